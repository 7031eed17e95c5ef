from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from .interface import KVPool, PageStorage
from .kv_cache import JoinedCaches
from .metadata import AttentionMetadata, Ints
from .residual import check_residual, residual_starts

if TYPE_CHECKING:
    import mlx.core as mx

Pool = TypeVar("Pool", bound=KVPool)


class ResidualCache(JoinedCaches, Generic[Pool]):
    """A pool of quantized pages and a pool of 16-bit residual pages.

    The metadata of a step has two groups: quantized pages, then residual pages.
    """

    def __init__(self, quantized: Pool, residual: Pool) -> None:
        check_residual(quantized.spec, residual.spec)
        self.quantized = quantized
        self.residual = residual
        self.storages: tuple[PageStorage, ...] = (quantized, residual)
        super().__init__((quantized, residual))
        window = residual.spec.layers[0].window
        assert window is not None
        self._window = window
        self._metadata: AttentionMetadata | None = None

    def begin_step(self, metadata: AttentionMetadata) -> None:
        metadata = self._begin(metadata)
        self.quantized.begin_step(metadata.select((0,)))
        self.residual.begin_step(metadata.select((1,)))

    def _begin(self, metadata: AttentionMetadata) -> AttentionMetadata:
        if len(metadata.groups) != 2:
            raise ValueError(
                f"a step must have quantized and residual pages, got {len(metadata.groups)} groups"
            )
        pages, residual = metadata.groups
        if pages.page_table.shape != residual.page_table.shape:
            raise ValueError("the tables of a step's pages and of its residual pages must have one shape")
        if residual.starts is None:
            starts = residual_starts(metadata.positions, window=self._window, page_size=metadata.page_size)
            metadata = replace(metadata, groups=(pages, residual._replace(starts=starts)))
        self._metadata = metadata
        return metadata

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        self.quantized.write(layer, keys, values)
        self.residual.write(layer, keys, values)

    def gather(self, layer: int) -> tuple[mx.array, mx.array]:
        import mlx.core as mx

        kinds = [pool.gather(layer) for pool in (self.quantized, self.residual)]
        seen = np.arange(kinds[0][0].shape[2])
        starts, keep = self.starts()[:, None], self.residual.spec.layers[layer].keep
        reads = mx.array((seen >= starts) | (seen < keep))[:, None, :, None]
        keys, values = (mx.where(reads, whole, quantized) for quantized, whole in zip(*kinds, strict=True))
        return keys, values

    def starts(self) -> Ints:
        """First position that each row reads from residual pages, [T]."""
        if self._metadata is None:
            raise ValueError("no step has begun; call begin_step first")
        starts = self._metadata.groups[1].starts
        assert starts is not None
        return starts
