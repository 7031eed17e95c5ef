"""Layers of different kinds: which of them share page tables, and one pool of pages for each kind.

A layer with a window needs the pages of the window only, so its page ids cannot be those of a
layer that sees everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .interface import AttentionBackend, KVPool, LayerSpec, PoolSpec
from .metadata import AttentionMetadata
from .residual import MixedPool, Residency

if TYPE_CHECKING:  # the control plane groups layers without importing MLX
    import mlx.core as mx
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """window, keep   as in LayerSpec, the same for all of them
    members        their indices among the model's layers, rising
    """

    window: int | None
    keep: int
    members: tuple[int, ...]


def group_layers(layers: Sequence[LayerSpec], max_model_len: int) -> tuple[LayerGroup, ...]:
    """Layers by what their queries can see: those that see everything first, then a group for each
    window, smallest last. A window that no sequence of ``max_model_len`` positions outgrows is none.
    """
    members: dict[tuple[int | None, int], list[int]] = {}
    for index, layer in enumerate(layers):
        bounded = layer.window is not None and layer.window < max_model_len
        kind = (layer.window, layer.keep) if bounded else (None, 0)
        members.setdefault(kind, []).append(index)
    kinds = sorted(members, key=lambda kind: (kind[0] is not None, -(kind[0] or 0), -kind[1]))
    return tuple(
        LayerGroup(window=window, keep=keep, members=tuple(members[window, keep])) for window, keep in kinds
    )


def twin_groups(groups: Sequence[LayerGroup], residency: Residency, page_size: int) -> tuple[LayerGroup, ...]:
    """The same layers, with the window and the kept positions that are read in 16 bits. Layers with a
    window of their own keep what they keep."""
    window = residency.window(page_size)
    return tuple(
        replace(group, window=window, keep=residency.keep_pages * page_size)
        if group.window is None
        else replace(group, window=min(window, group.window))
        for group in groups
    )


def create_pools(
    backend: AttentionBackend,
    spec: PoolSpec,
    groups: Sequence[LayerGroup],
    num_pages: Sequence[int],
    *,
    twins: Sequence[LayerGroup] = (),
    twin_format: str = "bf16",
) -> KVPool:
    """A pool for all layers of ``spec``, with so many pages for each group and then for each of its
    twins, if they are given."""
    specs = [
        replace(spec, layers=tuple(spec.layers[index] for index in group.members), num_pages=pages)
        for group, pages in zip(groups, num_pages, strict=False)
    ]
    if twins:
        sixteen = [
            _twin_spec(some, twin, pages, twin_format)
            for some, twin, pages in zip(specs, twins, num_pages[len(groups) :], strict=True)
        ]
        pools = [backend.create_mixed_pool(*both) for both in zip(specs, sixteen, strict=True)]
    else:
        pools = [backend.create_pool(some) for some in specs]
    return pools[0] if len(pools) == 1 else GroupedPool(pools, [group.members for group in groups])


def _twin_spec(spec: PoolSpec, twin: LayerGroup, num_pages: int, name: str) -> PoolSpec:
    layers = tuple(replace(layer, window=twin.window, keep=twin.keep) for layer in spec.layers)
    return replace(spec, layers=layers, num_pages=num_pages, k_format=name, v_format=name)


def page_pools(pool: KVPool) -> tuple[KVPool, ...]:
    """The pool of each group, then of each group's twins: what page ids of that group mean."""
    pools = pool.pools if isinstance(pool, GroupedPool) else (pool,)
    mixed = [some for some in pools if isinstance(some, MixedPool)]
    return (*(some.quantized for some in mixed), *(some.twins for some in mixed)) if mixed else pools


class GroupedPool:
    """``KVPool`` over one pool per group. What speaks of pages has to be asked of ``pools``, and layers
    are those of the model."""

    def __init__(self, pools: Sequence[KVPool], members: Sequence[Sequence[int]]) -> None:
        self.pools = tuple(pools)
        places = {
            layer: (pool, index)
            for pool, layers in zip(pools, members, strict=True)
            for index, layer in enumerate(layers)
        }
        self._places = [places[layer] for layer in range(len(places))]

    @property
    def spec(self) -> PoolSpec:
        raise ValueError("pages of a grouped pool have no one size; ask each of its pools")

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        count, parts = len(self.pools), metadata.groups
        twins = parts[count:] or [None] * count
        for pool, part, twin in zip(self.pools, parts, twins, strict=False):
            pool.begin_step(part if twin is None else replace(part, others=(twin,)))

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        pool, index = self._places[layer]
        pool.write(index, keys, values)

    def attend(
        self,
        layer: int,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        softcap: float | None = None,
        alibi_slopes: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> mx.array:
        pool, index = self._places[layer]
        return pool.attend(
            index,
            queries,
            scale=scale,
            sinks=sinks,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            mask=mask,
        )

    def gather(self, layer: int) -> tuple[mx.array, mx.array]:
        pool, index = self._places[layer]
        return pool.gather(index)

    def pending(self) -> list[mx.array]:
        return [array for pool in self.pools for array in pool.pending()]

    def nonfinite_tokens(self) -> list[int]:
        return sorted({row for pool in self.pools for row in pool.nonfinite_tokens()})

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        raise ValueError(f"pages {list(pairs)} belong to a group; copy them in its pool")

    def read_pages(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        raise ValueError(f"pages {list(pages)} belong to a group; read them from its pool")

    def write_pages(self, pages: Sequence[int], data: NDArray[np.uint8]) -> None:
        del data
        raise ValueError(f"pages {list(pages)} belong to a group; write them to its pool")
