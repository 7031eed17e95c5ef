from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from octavo.kernels.interface import PagedKVCache
from octavo.kernels.metadata import Ints
from octavo.kernels.replay import ReplayablePool

from .adapt.cache_adapter import HookError, LayerCache, StepContext
from .adapt.output_head import RowSelection
from .batch import Batch, OutputSelection, RowInput
from .cache_layout import AttentionCache, CacheLayout, CachePlace, StateCache
from .forward_outputs import Form, Outputs, results_of
from .mlx_lm_import import cache as caches_of_mlx_lm
from .recurrent.recurrent_layers import RecurrentLayers, StateShim
from .recurrent.segments import StateStep
from .recurrent.state_pool import StatePool, StateReplay
from .row_inputs import RowInputs

if TYPE_CHECKING:
    from .capture.graph_runner import Build, GraphRunner

FIRST_ROW: Ints = np.zeros(1, np.int32)
ALL_ROWS = OutputSelection()
CacheList: Any = caches_of_mlx_lm.CacheList


class UnusedShim:
    def __getattr__(self, name: str) -> object:
        raise HookError(f"the model uses {name!r} of a cache that it did not write when probed")


class PagedModel:
    def __init__(
        self,
        model: Module,
        layout: CacheLayout,
        kv_cache: PagedKVCache,
        *,
        selection: RowSelection | None = None,
        replay: bool = False,
        recurrent: RecurrentLayers | None = None,
        states: StatePool | None = None,
        row_inputs: RowInputs | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.states = states
        self._recurrent = recurrent
        self.selection = selection
        self.row_inputs = row_inputs or RowInputs()
        self._builds: dict[Form, Build] = {}
        self._is_computed = False
        self._model = model
        self.context = StepContext(kv_cache)
        self._layout = layout
        self._shims = [self._shim(place) for place in layout.caches]
        self.graph_runner: GraphRunner | None = None
        if replay and (pools := self._replayable()):
            from .capture.graph_runner import GraphRunner

            self.graph_runner = GraphRunner(pools)

    def _replayable(self) -> list[ReplayablePool]:
        pools = list(self.kv_cache.replayable)
        if self.states is None or (self._layout.layers and not pools):
            return pools
        if self._recurrent is None or not self._recurrent.all_native:
            return []
        bind = self._recurrent.recurrences.kernels.bind
        return [] if bind is None else [StateReplay(self.states, bind), *pools]

    def _shim(self, place: CachePlace) -> object:
        match place:
            case AttentionCache(layer):
                return LayerCache(self.context, layer, self._layout.layers[layer])
            case StateCache(_, size):
                assert self._recurrent is not None, "a model with recurrent layers was not prepared"
                return StateShim(size)
            case None:
                return UnusedShim()
            case _:
                return CacheList(*map(self._shim, place))

    def forward(
        self, batch: Batch, wanted: OutputSelection = ALL_ROWS, token_ids: mx.array | None = None
    ) -> Outputs:
        """Build the graph of a step, or run its captured program. Raises HookError.

        Call ``evaluate`` on the outputs exactly once before the next call.
        """
        step = batch.attention
        self.kv_cache.begin_step(step)
        self.context.begin(step)
        if self._recurrent is not None and self.states is not None:
            self._recurrent.begin(self.states, StateStep(step))
        rows, hidden = wanted.rows, wanted.hidden
        hidden = hidden if hidden is not None and len(hidden) else None
        has_logits = rows is None or len(rows) > 0
        form = Form(
            rows is not None, has_logits, wanted.greedy, hidden is not None, wanted.head, tuple(batch.inputs)
        )
        values: list[RowInput] = [step.positions]
        if rows is not None:
            values.append(rows if has_logits else FIRST_ROW)
        if hidden is not None:
            values.append(hidden)
        inputs = batch.inputs.values()
        values += inputs
        if self.graph_runner is not None and all(value.dtype == np.int32 for value in inputs):
            assert token_ids is None, "captured programs need tokens that the host knows"
            if (build := self._builds.get(form)) is None:
                build = self._builds[form] = functools.partial(self._build, form)
            found = self.graph_runner(build, cast("list[Ints]", [batch.token_ids, *values]))
            self._is_computed = self.graph_runner.is_computed
        else:
            tokens = mx.array(batch.token_ids) if token_ids is None else token_ids
            found = self._build(form, [tokens, *map(mx.array, values)], False)
            self._is_computed = False
        return Outputs.of(form, found)

    @property
    def computes_apart(self) -> bool:
        return self.graph_runner is not None or self.states is not None

    def evaluate(self, out: Sequence[mx.array]) -> None:
        if not self._is_computed:
            states = self.states.pending() if self.states is not None else ()
            mx.eval(*out, *self.kv_cache.pending(), *states)
        if self.states is not None:
            self.states.commit()

    def nonfinite_rows(self) -> list[int]:
        rows = self.kv_cache.nonfinite_tokens()
        return rows if self.states is None else sorted({*rows, *self.states.nonfinite_rows()})

    def _build(self, form: Form, arrays: Sequence[mx.array], traced: bool) -> list[mx.array]:
        given = iter(arrays)
        token_ids, self.context.positions = next(given), next(given)
        self.context.traced = traced
        rows = next(given) if form.takes_rows else None
        hidden = next(given) if form.hidden else None
        self.row_inputs.arrays = dict(zip(form.inputs, given, strict=True))
        try:
            if self.selection is not None:
                with self.selection.choosing(rows, hidden, greedy=form.greedy) as found:
                    return results_of(form, self._output(token_ids), found)
            if form.hidden or form.greedy:
                raise HookError("the output head and its input were not found")
            logits = self._output(token_ids).squeeze(1)
            return [logits if rows is None else logits[rows]] if form.logits else []
        finally:
            self.row_inputs.clear()

    def _output(self, token_ids: mx.array) -> mx.array:
        logits: mx.array = self._model(token_ids[:, None], cache=self._shims)
        return logits
