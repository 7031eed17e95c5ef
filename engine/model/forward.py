"""One forward of a model through a page pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from octavo.engine.model.head import RowSelection
from octavo.engine.model.hook import HookError, LayerShim, StepContext
from octavo.engine.model.layers import CacheLayout
from octavo.engine.model.replay import Replay, ReplayablePool
from octavo.kernels.groups import page_pools
from octavo.kernels.interface import KVPool
from octavo.kernels.metadata import AttentionMetadata, Ints


class UnusedShim:
    """Stands in for a cache the model never writes; anything done with it is refused."""

    def __getattr__(self, name: str) -> object:
        raise HookError(f"the model uses {name!r} of a cache that it did not write when probed")


class PagedModel:
    """A model and a pool. ``mask_dims`` as in StepContext; ``selection`` None: the head computes
    every row; ``replay``: graphs of steps that repeat are replayed where the pool allows it."""

    def __init__(
        self,
        model: Module,
        layout: CacheLayout,
        pool: KVPool,
        *,
        mask_dims: int | None = None,
        selection: RowSelection | None = None,
        replay: bool = False,
    ) -> None:
        self.pool = pool
        self.selection = selection
        self._model = model
        self._context = StepContext(pool, mask_dims=mask_dims)
        self._shims = [
            UnusedShim() if index is None else LayerShim(self._context, index, layout.layers[index])
            for index in layout.pool_index
        ]
        self.replay: Replay | None = None
        pools = [part for part in page_pools(pool) if isinstance(part, ReplayablePool)]
        if replay and mask_dims is None and len(pools) == len(page_pools(pool)):
            self.replay = Replay(pools, self._build)

    def forward(self, token_ids: Ints, metadata: AttentionMetadata, rows: Ints | None = None) -> mx.array:
        """Logits [len(rows), V] of those rows of the T tokens, or [T, V]; not evaluated.

        Evaluate them together with ``pool.pending()``, exactly once, before the next call.
        """
        self._context.begin(metadata)
        arrays = [mx.array(token_ids), self._context.positions]
        if rows is not None:
            arrays.append(mx.array(rows))
        return self._build(arrays, False) if self.replay is None else self.replay(arrays)

    def _build(self, arrays: Sequence[mx.array], traced: bool) -> mx.array:
        """The graph of the step that has begun: of its tokens, positions and wanted rows."""
        self._context.traced = traced
        token_ids, self._context.positions, *rest = arrays
        wanted = rest[0] if rest else None
        if self.selection is None:
            logits = self._logits(token_ids)
            return logits if wanted is None else logits[wanted]
        self.selection.rows = wanted
        try:
            return self._logits(token_ids)
        finally:
            self.selection.rows = None

    def _logits(self, token_ids: mx.array) -> mx.array:
        logits: mx.array = self._model(token_ids[:, None], cache=self._shims)
        return logits.squeeze(1)


def plain_logits(model: Module, token_ids: list[int], caches: list[Any] | None = None) -> mx.array:
    """Logits [L, V] of one sequence by mlx-lm's own caches and attention."""
    logits: mx.array = model(mx.array([token_ids]), cache=caches or make_prompt_cache(model))
    return logits[0]


def slice_rows(metadata: AttentionMetadata, first: int, stop: int) -> AttentionMetadata:
    """The step as if it consisted of rows [first, stop) alone, the rows before them done."""
    if first == 0 and stop == metadata.num_tokens:
        return metadata
    begin = int(np.searchsorted(metadata.q_start, first, side="right")) - 1
    end = int(np.searchsorted(metadata.q_start, stop, side="left"))
    q_start = np.clip(metadata.q_start[begin : end + 1], first, stop)
    return AttentionMetadata(
        positions=metadata.positions[first:stop],
        slots=metadata.slots[first:stop],
        q_start=q_start - np.int32(first),
        kv_len=metadata.positions[q_start[1:] - 1] + np.int32(1),
        page_table=metadata.page_table[begin:end],
        page_size=metadata.page_size,
        others=tuple(slice_rows(other, first, stop) for other in metadata.others),
    )
