"""Attention over quantized pages and the 16-bit pages of their residual window: what backends share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from .interface import KVPool, PageStorage
from .metadata import AttentionMetadata, Ints
from .replay import ReplayablePool
from .residual import check_residual, residual_starts

if TYPE_CHECKING:
    import mlx.core as mx

Pool = TypeVar("Pool", bound=KVPool)


class ResidualCache(Generic[Pool]):
    """``PagedKVCache`` over a pool of quantized pages and one of residual pages, the groups of a step's
    metadata in this order: all of it but ``attend``."""

    def __init__(self, quantized: Pool, residual: Pool) -> None:
        check_residual(quantized.spec, residual.spec)
        self.quantized = quantized
        self.residual = residual
        self.storages: tuple[PageStorage, ...] = (quantized, residual)
        parts = quantized.replayable, residual.replayable
        self.replayable: tuple[ReplayablePool, ...] = (*parts[0], *parts[1]) if all(parts) else ()
        self._windows = np.array([layer.window for layer in residual.spec.layers], np.int32)
        self._metadata: AttentionMetadata | None = None

    def begin_step(self, metadata: AttentionMetadata) -> None:
        self._begin(metadata)
        self.quantized.begin_step(metadata.select((0,)))
        self.residual.begin_step(metadata.select((1,)))

    def _begin(self, metadata: AttentionMetadata) -> None:
        """``begin_step``, but for telling the pools."""
        if len(metadata.groups) != 2:
            raise ValueError(f"pages and residual pages are 2 groups, got {len(metadata.groups)}")
        pages, residual = metadata.groups
        if pages.page_table.shape != residual.page_table.shape:
            raise ValueError("the tables of a step's pages and of its residual pages must have one shape")
        self._metadata = metadata

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        self.quantized.write(layer, keys, values)
        self.residual.write(layer, keys, values)

    def gather(self, layer: int) -> tuple[mx.array, mx.array]:
        """Of each row's sequence, every position from the pages that the row's query reads it from."""
        import mlx.core as mx

        kinds = [pool.gather(layer) for pool in (self.quantized, self.residual)]
        seen = np.arange(kinds[0][0].shape[2])
        starts, keep = self.starts()[:, layer, None], self.residual.spec.layers[layer].keep
        reads = mx.array((seen >= starts) | (seen < keep))[:, None, :, None]
        keys, values = (mx.where(reads, whole, quantized) for quantized, whole in zip(*kinds, strict=True))
        return keys, values

    def starts(self) -> Ints:
        """Where the residual window of each row begins in each layer, [T, layers]."""
        if (step := self._metadata) is None:
            raise ValueError("no step has begun; call begin_step first")
        after = (
            np.zeros(1, np.int32) if step.quantize_after is None else step.quantize_after[step.row_sequences]
        )
        return residual_starts(
            step.positions[:, None], after[:, None], window=self._windows, page_size=step.page_size
        )

    def pending(self) -> list[mx.array]:
        return [*self.quantized.pending(), *self.residual.pending()]

    def flags(self) -> list[mx.array]:
        return [*self.quantized.flags(), *self.residual.flags()]

    def nonfinite_tokens(self) -> list[int]:
        rows = self.quantized.nonfinite_tokens() + self.residual.nonfinite_tokens()
        return sorted(set(rows)) if rows else rows
