"""Sizes of page pools: division of a budget of bytes between groups of layers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octavo.block_manager import FullAttention, KVGroupSpec, ResidualWindow, SlidingWindow
from octavo.block_manager.spec import UNBOUNDED, pages_for
from octavo.kernels.groups import LayerGroup, group_layers, residual_groups
from octavo.kernels.interface import LayerSpec

from ..api.config import SINK_TOKENS, EngineConfig
from ..api.errors import InvalidConfig, ModelLoadError
from .budget import (
    DEFAULT_KV_MEMORY,
    DEFAULT_SEQUENCE_TOKENS,
    SHORT_SEQUENCE_TOKENS,
    format_size,
    page_bytes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    groups: tuple[LayerGroup, ...]
    specs: tuple[KVGroupSpec, ...]
    residual: tuple[LayerGroup, ...] = ()
    group_bytes: tuple[int, ...]
    page_size: int
    needs: Callable[[ResidualWindow, int], int] = lambda spec, _: spec.num_pages
    draft_bytes: Callable[[int], int] = lambda _: 0

    @property
    def all_groups(self) -> tuple[LayerGroup, ...]:
        return self.groups + self.residual

    @property
    def page_bytes(self) -> int:
        return sum(self.group_bytes[: len(self.groups)])

    def pages(self, num_pages: int) -> tuple[int, ...]:
        """Return the number of pages of each group, if the first group has ``num_pages``."""
        return tuple(
            min(
                num_pages,
                self.needs(spec, num_pages) if isinstance(spec, ResidualWindow) else spec.num_pages,
            )
            for spec in self.specs
        )

    def pages_per_sequence(self, index: int, num_tokens: int) -> int:
        """Return the number of pages that a sequence of ``num_tokens`` needs in one group."""
        return self.specs[index].decode_pages(num_tokens, self.page_size)

    def bytes_for(self, num_pages: int) -> int:
        """Return the bytes of all pools, with the draft model."""
        return self.own_bytes_for(num_pages) + self.draft_bytes(num_pages)

    def own_bytes_for(self, num_pages: int) -> int:
        return sum(pages * size for pages, size in zip(self.pages(num_pages), self.group_bytes, strict=True))

    def pages_within(self, budget: int) -> int:
        """Return the largest ``num_pages`` within a budget of bytes."""
        first = self.group_bytes[0] or sum(self.group_bytes)
        return bisect_right(range(1, budget // first + 1), budget, key=self.bytes_for)

    def page_groups(self, num_pages: int) -> tuple[KVGroupSpec, ...]:
        return tuple(
            replace(spec, num_pages=pages)
            for spec, pages in zip(self.specs, self.pages(num_pages), strict=True)
        )


def head_layer(layers: Sequence[LayerSpec]) -> LayerSpec:
    return next((layer for layer in reversed(layers) if layer.window is None), layers[-1])


def with_max_kv_size(layers: Sequence[LayerSpec], *, max_kv_size: int) -> tuple[LayerSpec, ...]:
    """Give layers without a window the window of mlx-lm's ``make_prompt_cache(model, max_kv_size)``."""
    return tuple(
        replace(layer, window=max_kv_size - SINK_TOKENS, keep=SINK_TOKENS) if layer.window is None else layer
        for layer in layers
    )


def with_windows(layers: Sequence[LayerSpec], windows: Sequence[int | None]) -> tuple[LayerSpec, ...]:
    """Return the layers with the configured windows. Raises ModelLoadError."""
    if len(windows) != len(layers):
        return tuple(layers)
    if any(layer.window is not None for layer in layers):
        for index, (layer, window) in enumerate(zip(layers, windows, strict=True)):
            if (layer.window is None) != (window is None):
                raise ModelLoadError(
                    f"layer_types must be {'full' if layer.window is None else 'sliding'}_attention in layer "
                    f"{index}, as mlx-lm computes it, got the other kind; serve a model without this setting"
                )
        return tuple(layers)
    return tuple(replace(layer, window=window, keep=0) for layer, window in zip(layers, windows, strict=True))


def sizing(layers: Sequence[LayerSpec], config: EngineConfig, max_model_len: int) -> Sizing:
    """Return the sizing of a model's pools. Raises InvalidConfig."""
    page_size, residual, max_step_tokens = config.page_size, config.residual, config.max_step_tokens
    max_running, max_pinned = config.max_running, config.max_pinned_pages
    sequence_tokens = SHORT_SEQUENCE_TOKENS if config.num_pages else DEFAULT_SEQUENCE_TOKENS
    groups = group_layers(layers, max_model_len) or (LayerGroup(window=None, keep=0, members=()),)
    beside = () if residual is None else residual_groups(groups, residual, page_size)
    specs = [_spec(group) for group in groups]
    after = 0 if residual is None else residual.quantize_after
    specs += [_residual_spec(each, index, specs[index], after) for index, each in enumerate(beside)]
    bounded = groups[0].window is None
    own = config.page_formats
    formats = [(own.k, own.v)] * len(groups) + [("bf16", "bf16")] * len(beside)

    def sized(spec: KVGroupSpec) -> KVGroupSpec:
        if not bounded or isinstance(spec, ResidualWindow):
            return spec
        useful = spec.useful_pages(page_size, max_running=max_running, max_step_tokens=max_step_tokens)
        return replace(spec, num_pages=useful + max_pinned)

    def needs(spec: ResidualWindow, num_pages: int) -> int:
        per_sequence = specs[0].decode_pages(min(sequence_tokens, max_model_len), page_size)
        sequences = pages_for(num_pages, per_sequence)
        useful = spec.useful_pages(
            page_size,
            max_running=min(sequences, max_running),
            max_step_tokens=max_step_tokens,
            num_cached=max(sequences - max_running, 0),
        )
        return useful + max_pinned

    return Sizing(
        groups=groups,
        residual=beside,
        specs=tuple(map(sized, specs)),
        group_bytes=tuple(
            page_bytes(
                [layers[index] for index in group.members],
                page_size=page_size,
                k_format=k_name,
                v_format=v_name,
            )
            for group, (k_name, v_name) in zip(groups + beside, formats, strict=True)
        ),
        page_size=page_size,
        needs=needs,
    )


def _spec(group: LayerGroup) -> KVGroupSpec:
    if group.window is None:
        return FullAttention(num_pages=UNBOUNDED)
    return SlidingWindow(num_pages=UNBOUNDED, window=group.window, keep=group.keep)


def _residual_spec(own: LayerGroup, index: int, outer: KVGroupSpec, quantize_after: int) -> ResidualWindow:
    assert own.window is not None
    return ResidualWindow(
        num_pages=UNBOUNDED,
        window=own.window,
        keep=own.keep,
        residual_of=index,
        outer_window=outer.window,
        quantize_after=quantize_after,
    )


def num_pages_for(
    sizing: Sizing,
    *,
    kv_memory: int | None,
    num_pages: int | None,
    max_running: int,
    max_model_len: int,
    available: int,
) -> int:
    """Return the number of pages of the first group's pool.

    Without ``num_pages`` and ``kv_memory``, the pages hold 2,048 tokens per running sequence, or one
    sequence of the model's full length. They take at most 2 GiB and a quarter of the available memory.
    Raises InvalidConfig if not even one page fits.
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
