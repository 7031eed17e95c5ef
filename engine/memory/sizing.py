"""How many pages each group of layers gets out of one budget of bytes. No MLX."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.block_manager import PageGroup
from octavo.block_manager.group import pages_touched
from octavo.kernels.groups import LayerGroup, group_layers, residual_groups
from octavo.kernels.interface import LayerSpec
from octavo.kernels.residual import ResidualSpec

from ..api.errors import InvalidConfig
from .budget import (
    DEFAULT_KV_MEMORY,
    DEFAULT_SEQUENCE_TOKENS,
    format_size,
    page_bytes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Groups of layers and their residual windows, if there are any, bytes of a page in each (those last),
    and how many pages are of use to a group.

    A group without a window can use any number. One with a window needs, for each running sequence,
    what its window can touch and the page being written, and once the pages of a step's tokens;
    as many again may be cached. What goes beyond would only be used if the others had pages left.
    """

    groups: tuple[LayerGroup, ...]
    residual: tuple[LayerGroup, ...] = ()
    group_bytes: tuple[int, ...]
    most_useful: tuple[int, ...]
    page_size: int

    @property
    def all_groups(self) -> tuple[LayerGroup, ...]:
        """The groups, then their residual windows."""
        return self.groups + self.residual

    def pages(self, num_pages: int) -> tuple[int, ...]:
        """Of each of them, for ``num_pages`` of those that grow with a sequence's length."""
        return tuple(min(num_pages, most) for most in self.most_useful)

    def pages_per_sequence(self, index: int, num_tokens: int) -> int:
        """Of one group, for a sequence of so many positions that is being decoded."""
        group, pages = self.all_groups[index], -(-num_tokens // self.page_size)
        if group.window is None:
            return pages
        return min(pages, -(-group.keep // self.page_size) + pages_touched(group.window, self.page_size))

    def bytes_for(self, num_pages: int) -> int:
        return sum(pages * size for pages, size in zip(self.pages(num_pages), self.group_bytes, strict=True))

    def pages_within(self, budget: int) -> int:
        """The largest number of pages whose bytes, with those of the other groups, fit the budget."""
        spent, rate = 0, sum(self.group_bytes)
        for most, size in sorted(zip(self.most_useful, self.group_bytes, strict=True)):
            if (budget - spent) // rate <= most:
                break
            spent, rate = spent + most * size, rate - size
        return (budget - spent) // rate

    def page_groups(self, num_pages: int) -> tuple[PageGroup, ...]:
        return tuple(
            PageGroup(
                num_pages=pages,
                window=group.window,
                keep=group.keep,
                twin_of=index - len(self.groups) if index >= len(self.groups) else None,
            )
            for index, (group, pages) in enumerate(zip(self.all_groups, self.pages(num_pages), strict=True))
        )


def with_max_kv_size(layers: Sequence[LayerSpec], *, max_kv_size: int, keep: int) -> tuple[LayerSpec, ...]:
    """The same with a window in layers that have none: a token sees ``max_kv_size`` positions, the first
    ``keep`` of the sequence among them. What mlx-lm's ``make_prompt_cache(model, max_kv_size)`` does."""
    return tuple(
        replace(layer, window=max_kv_size - keep, keep=keep) if layer.window is None else layer
        for layer in layers
    )


def sizing(
    layers: Sequence[LayerSpec],
    *,
    k_format: str,
    v_format: str,
    page_size: int,
    max_model_len: int,
    max_running: int,
    max_step_tokens: int,
    max_pinned: int = 0,
    residual: ResidualSpec | None = None,
    num_residual: int | None = None,
) -> Sizing:
    """InvalidConfig if a format cannot hold a layer's rows. ``num_residual``: residual pages of each group
    (None: as many as are of use)."""
    groups = group_layers(layers, max_model_len)
    beside = () if residual is None else residual_groups(groups, residual, page_size)
    bounded = groups[0].window is None  # else windows are all there is, and get all there is
    formats = [(k_format, v_format)] * len(groups) + [("bf16", "bf16")] * len(beside)  # as large as fp16
    most_useful = [
        _most_useful(group, page_size, max_running, max_step_tokens) + max_pinned
        if bounded and group.window is not None
        else sys.maxsize
        for group in groups
    ]
    for own, outer in zip(beside, groups, strict=False):
        assert residual is not None
        most = _useful_residual(own, outer, residual, page_size, max_running, max_step_tokens)
        most_useful.append(num_residual or most + max_pinned)
    return Sizing(
        groups=groups,
        residual=beside,
        group_bytes=tuple(
            page_bytes(
                [layers[index] for index in group.members],
                page_size=page_size,
                k_format=k_name,
                v_format=v_name,
            )
            for group, (k_name, v_name) in zip(groups + beside, formats, strict=True)
        ),
        most_useful=tuple(most_useful),
        page_size=page_size,
    )


def _most_useful(group: LayerGroup, page_size: int, max_running: int, max_step_tokens: int) -> int:
    assert group.window is not None
    kept = -(-group.keep // page_size)
    per_sequence = kept + pages_touched(group.window, page_size) + 1
    one_alone = kept + pages_touched(group.window - 1 + max_step_tokens, page_size)
    return 2 * max_running * per_sequence + one_alone


def _useful_residual(
    own: LayerGroup,
    outer: LayerGroup,
    residual: ResidualSpec,
    page_size: int,
    max_running: int,
    max_step_tokens: int,
) -> int:
    """For each running sequence what it reads in 16 bits and a page to go on to, once the pages of a step's
    tokens, and as many kept pages again for prefixes that nobody holds."""
    assert own.window is not None
    seen = max(own.window, min(residual.quantize_after, outer.window or residual.quantize_after))
    kept, touched = -(-own.keep // page_size), pages_touched(seen, page_size)
    cached = kept + (touched if seen > 1 else 0)
    step = pages_touched(seen - 1 + max_step_tokens, page_size)
    return max_running * (kept + touched + 1 + cached) + kept + step


def num_pages_for(
    sizing: Sizing,
    *,
    kv_memory: int | None,
    num_pages: int | None,
    max_running: int,
    max_model_len: int,
    available: int,
) -> int:
    """How many pages the first group's pool gets; the others follow, see ``Sizing.pages``.

    ``num_pages`` or ``kv_memory`` decide if given. Otherwise: 2,048 tokens for each running
    sequence or one sequence of the model's full length, whichever is more, within 2 GiB and a
    quarter of the memory that is available. InvalidConfig if not even one page fits.
    """
    if num_pages is not None:
        return num_pages
    if kv_memory is not None:
        budget, source = kv_memory, "kv_memory"
    else:
        tokens = max(max_running * min(DEFAULT_SEQUENCE_TOKENS, max_model_len), max_model_len)
        wanted = sizing.bytes_for(-(-tokens // sizing.page_size))
        budget, source = min(wanted, DEFAULT_KV_MEMORY, available // 4), "a quarter of the available memory"
    if budget < sizing.bytes_for(1):
        raise InvalidConfig(
            f"{source} is {format_size(budget)}, but one page of {sizing.page_size} positions takes "
            f"{format_size(sizing.bytes_for(1))}; "
            "give more memory, a smaller page_size or a smaller kv_format"
        )
    return sizing.pages_within(budget)
