"""One forward of a model through a page pool."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from octavo.kernels.interface import PagedKVCache
from octavo.kernels.metadata import Ints, StepRows
from octavo.kernels.replay import ReplayablePool

from .adapt.cache_adapter import HookError, LayerCache, StepContext
from .adapt.output_head import RowSelection
from .capture.graph_runner import Build, GraphRunner
from .load.discover import AttentionCache, CacheLayout, CachePlace, StateCache
from .recurrent.recurrent_layers import ListShim, RecurrentLayers, StateShim
from .recurrent.segments import StateStep
from .recurrent.state_pool import StatePool
from .recurrent.state_replay import StateReplay

FIRST_ROW: Ints = np.zeros(1, np.int32)  # where nobody wants any: a head of no rows is a case of its own


class UnusedShim:
    """Stands in for a cache the model never writes; anything done with it is refused."""

    def __getattr__(self, name: str) -> object:
        raise HookError(f"the model uses {name!r} of a cache that it did not write when probed")


class PagedModel:
    """A model and its KV cache. ``mask_dims`` as in StepContext; ``selection`` None: the head computes
    every row; ``replay``: graphs of steps that repeat are replayed where the cache allows it. ``recurrent``
    and ``states``: its recurrent layers and their slots, where it has any; what operations write there is not
    replayed."""

    def __init__(
        self,
        model: Module,
        layout: CacheLayout,
        kv_cache: PagedKVCache,
        *,
        mask_dims: int | None = None,
        selection: RowSelection | None = None,
        replay: bool = False,
        recurrent: RecurrentLayers | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.states = states
        self._recurrent = recurrent
        self.selection = selection
        self._model = model
        self._context = StepContext(kv_cache, mask_dims=mask_dims)
        self._layout = layout
        self._layer_shims: list[LayerCache] = []
        self._shims = [self._shim(place) for place in layout.caches]
        self.graph_runner: GraphRunner | None = None
        if replay and mask_dims is None and (pools := self._replayable()):
            self.graph_runner = GraphRunner(pools)

    def _replayable(self) -> list[ReplayablePool]:
        """All that a step writes to, if it can be captured; states first (``StateReplay.pending``)."""
        pools = list(self.kv_cache.replayable)
        if self.states is None or (self._layout.layers and not pools):
            return pools
        recurrences = None if self._recurrent is None else self._recurrent.recurrences
        if self._recurrent is None or recurrences is None or not self._recurrent.all_native:
            return []
        capture = recurrences.kernels.state_capture()
        return [] if capture is None else [StateReplay(self.states, capture), *pools]

    def _shim(self, place: CachePlace) -> object:
        """What the model gets in place of a cache."""
        match place:
            case AttentionCache(layer):
                shim = LayerCache(self._context, layer, self._layout.layers[layer])
                self._layer_shims.append(shim)
                return shim
            case StateCache(index, size):
                assert self._recurrent is not None, "a model with recurrent layers was not prepared"
                return StateShim(self._recurrent, index, size)
            case None:
                return UnusedShim()
            case _:
                return ListShim([self._shim(part) for part in place])

    def forward(self, token_ids: Ints | mx.array, step: StepRows, rows: Ints | None = None) -> mx.array:
        """Logits [len(rows), V] of those rows of the T tokens, or [T, V]; not evaluated. The KV cache has
        begun the step: only it is told where pages are.

        ``evaluate`` whatever is made of them, exactly once, before the next call.
        """
        return self._step(self._build_logits, token_ids, step, rows)[0]

    def write(self, token_ids: Ints, step: StepRows) -> None:
        """Only the K/V of the step, for rows that nobody draws from; evaluated like ``forward``."""
        self._step(self._build_nothing, token_ids, step, FIRST_ROW)

    def forward_and_hidden(
        self, token_ids: Ints, step: StepRows, rows: Ints, hidden_rows: Ints
    ) -> tuple[mx.array, mx.array]:
        """Logits as ``forward``, and what the output head gets of ``hidden_rows``, float32 [P, D]; evaluated
        like them. HookError where the head is not known."""
        logits, hidden = self._step(self._build_hidden, token_ids, step, rows, hidden_rows)
        return logits, hidden

    def forward_greedy(self, token_ids: Ints, step: StepRows, rows: Ints) -> list[mx.array]:
        """The greedy choice of each of those rows, without all of their logits; evaluated like ``forward``:
        ids int32 [S] of the largest logits (the lowest among equals), and those logits, float32 [S]: NaN
        where any of the row is, and then the id means nothing.

        Raises HookError if the model's output is not exactly what its head gives, or its head
        cannot choose: a matter of the model, which the check at load asks once.
        """
        return self._step(self._build_greedy, token_ids, step, rows)

    @property
    def is_paged(self) -> bool:
        """Whether attention reads pages; otherwise K/V are gathered."""
        return self._context.mask_dims is None

    @property
    def computes_apart(self) -> bool:
        """Whether a step is more than one graph that MLX evaluates: a program, or states that are moved."""
        return self.graph_runner is not None or self.states is not None

    @property
    def latent_layers(self) -> set[int]:
        """Layers that attended over latents, in the steps so far, by their index in the pool."""
        return self._context.latent_layers

    @property
    def gathers(self) -> bool:
        """Whether layers collected K or V of whole sequences, in the steps so far."""
        return self._context.gathers

    def begin_layer(self, layer: int, step: StepRows) -> LayerCache:
        """Begin a step in which nothing but one layer's attention is computed, by what stands for its
        cache."""
        self._context.begin(step)
        self._context.positions, self._context.traced = mx.array(step.positions), False
        return next(shim for shim in self._layer_shims if shim.layer == layer)

    def evaluate(self, out: Sequence[mx.array]) -> None:
        """Compute what the last step gave, and its writes, unless that is done. States reach their slots."""
        if self.graph_runner is None or not self.graph_runner.is_computed:
            states = self.states.pending() if self.states is not None else ()
            mx.eval(*out, *self.kv_cache.pending(), *states)
        if self.states is not None:
            self.states.commit()

    def nonfinite_rows(self) -> list[int]:
        """Rows of the evaluated step whose K, V or state held NaN or infinity."""
        rows = self.kv_cache.nonfinite_tokens()
        return rows if self.states is None else sorted({*rows, *self.states.nonfinite_rows()})

    def _step(
        self, build: Build, token_ids: Ints | mx.array, step: StepRows, rows: Ints | None, *more: Ints
    ) -> list[mx.array]:
        self._context.begin(step)
        if self._recurrent is not None and self.states is not None:
            self._recurrent.begin(self.states, StateStep(self.states.staged(step)))
        values = [step.positions] if rows is None else [step.positions, rows]
        values += more
        if self.graph_runner is not None:
            assert isinstance(token_ids, np.ndarray), "programs are given tokens that are known"
            return self.graph_runner(build, [token_ids, *values])
        return build([mx.array(token_ids), *(mx.array(value) for value in values)], False)

    def _build_logits(self, arrays: Sequence[mx.array], traced: bool) -> list[mx.array]:
        """The graph of the step that has begun: of its tokens, positions and wanted rows."""
        self._context.traced = traced
        token_ids, self._context.positions, *rest = arrays
        wanted = rest[0] if rest else None
        if self.selection is None:
            logits = self._output(token_ids).squeeze(1)
            return [logits if wanted is None else logits[wanted]]
        self.selection.rows = wanted
        try:
            return [self._output(token_ids).squeeze(1)]
        finally:
            self.selection.rows = None

    def _build_nothing(self, arrays: Sequence[mx.array], traced: bool) -> list[mx.array]:
        """The same without results: the output head stays without a reader."""
        self._build_logits(arrays, traced)
        return []

    def _build_hidden(self, arrays: Sequence[mx.array], traced: bool) -> list[mx.array]:
        """Logits and hidden states."""
        if self.selection is None:
            raise HookError("the output head is not known, nor what it gets")
        *rest, self.selection.kept_rows = arrays
        try:
            (logits,) = self._build_logits(rest, traced)
            kept = self.selection.kept
        finally:
            self.selection.kept_rows = self.selection.kept = None
        if kept is None:
            raise HookError("the output head was not called")
        return [logits, kept.squeeze(1).astype(mx.float32)]

    def _build_greedy(self, arrays: Sequence[mx.array], traced: bool) -> list[mx.array]:
        """The same, ending in what the head chose: logits of the graph stay without a reader."""
        if self.selection is None:
            raise HookError("the output head computes every row")
        self._context.traced = traced
        token_ids, self._context.positions, self.selection.rows = arrays
        self.selection.greedy = True
        try:
            output, choice = self._output(token_ids), self.selection.greedy_output
        finally:
            self.selection.greedy, self.selection.greedy_output, self.selection.rows = False, None, None
        if choice is None:
            raise HookError("the output head is not a native module")
        if output is not choice.of:
            raise HookError("the model changes the logits that its head gives")
        return [choice.ids.squeeze(1), choice.logits.squeeze(1)]

    def _output(self, token_ids: mx.array) -> mx.array:
        """What the model returns for rows that are sequences of one token each: [rows, 1, V]."""
        logits: mx.array = self._model(token_ids[:, None], cache=self._shims)
        return logits
