"""The runner: a hooked model, its page pool, and one forward with its draws per step."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from octavo.block_manager import PageCopy, ResidualWindow
from octavo.kernels.backends import release_kept_memory
from octavo.kernels.interface import PageStorage, PoolSpec
from octavo.kernels.metadata import Ints, StepRows
from octavo.kernels.page_bytes import PageBytes

from ..api.engine_info import EngineInfo
from ..api.outputs import TokenLogprob
from ..kv_store.fingerprint import model_fingerprint
from ..kv_store.page_runs import PageLayoutKey, StateKind
from .base import Pending, Resolved, RunOutput
from .batch import Batch, ScoredRows, counting, slice_rows
from .device_step import DeviceStep
from .failures import with_failures
from .mtp.runner import MTPRunner
from .paged_model import FIRST_ROW, PagedModel
from .sampling.logit_rows import NumpySampler, Sampler, Target
from .sampling.sampler import NOT_FINITE, Sampled, SampleState

NO_ROWS: Ints = np.zeros(0, np.int32)
LOGIT_BYTES = 64 * 1024**2  # logits of prompt tokens that are scored at once, as float32
GATHER_BYTES = 256 * 1024**2  # dense K/V of one layer that the gather tier holds at once


class PagedRunner:
    """``ModelRunner`` over a paged KV cache.

    ``dense_row_bytes`` is what one row of one layer takes per visible position in the gather
    tier (None: paged tier): a step is then computed in slices of rows that stay below
    GATHER_BYTES. With ``fused_argmax`` the model's head chooses the tokens of steps in which every token
    is plainly greedy; ``sampling`` draws those of all others, in NumPy if it is not given.
    ``on_device``: in the paged tier, tokens are drawn where the logits are, in the step's graph, and
    with ``feeds`` the next step may take them from there. ``head``: the model's own, which guesses.
    """

    def __init__(
        self,
        model: PagedModel,
        info: EngineInfo,
        *,
        dense_row_bytes: int | None,
        exact: bool = False,
        fused_argmax: bool = False,
        sampling: Sampler | None = None,
        on_device: bool = False,
        feeds: bool = False,
        head: MTPRunner | None = None,
    ) -> None:
        self.head = head
        self._model = model
        self._info = info
        self._dense_row_bytes = dense_row_bytes
        self._exact = exact
        self._fused_argmax = fused_argmax
        self._on_device = on_device and dense_row_bytes is None and not model.computes_apart
        self._feeds = feeds
        self._sampling = NumpySampler() if sampling is None else sampling

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, batch: Batch, states: Sequence[SampleState], after: Pending | None = None) -> Pending:
        """As ``ModelRunner.submit``. Raises ValueError for token ids or pages that do not exist:
        neither the embedding nor the kernels check."""
        self._check_tokens(batch)
        if batch.copies:
            self._copy(batch.copies)
        plain = batch.scored is None and batch.embedded is None
        if self._on_device and states and plain:
            return self._launch(batch, states, cast("DeviceStep | None", after))
        assert after is None, "this step is computed when it is submitted"
        if self._fused_argmax and plain and all(state.is_argmax for state in states):
            return Resolved(self._run_greedy(batch, states))
        return Resolved(self._run_sampling(batch, states))

    def _check_tokens(self, batch: Batch) -> None:
        vocab_size = self._info.vocab_size
        token_ids = batch.token_ids.tolist()
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= vocab_size:
            raise ValueError(f"token ids must lie in [0, {vocab_size}), got values from {low} to {high}")

    def _launch(self, batch: Batch, states: Sequence[SampleState], after: DeviceStep | None) -> DeviceStep:
        """Begin a step, and leave it to itself."""
        rows, places = _each_once(batch.sample_rows)
        token_ids: Ints | mx.array = batch.token_ids
        if after is not None:
            assert batch.sources is not None, "nothing says which tokens follow"
            token_ids = after.take(batch.sources)
        self._model.kv_cache.begin_step(batch.attention)
        logits = self._model.forward(token_ids, batch.attention, rows)
        step = DeviceStep(
            batch,
            logits,
            places,
            states,
            self._model.kv_cache.flags(),
            sampling=self._sampling,
            after=after,
            feeds=self._feeds,
        )
        mx.async_eval(*step.arrays, *self._model.kv_cache.pending())
        return step

    def run(self, batch: Batch, states: Sequence[SampleState]) -> RunOutput:
        return self.submit(batch, states).resolve()

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages, and the slots of states, which come behind all groups of pages."""
        for group, pages in enumerate(self.storages):
            if pairs := [(copy.source, copy.target) for copy in copies if copy.group == group]:
                pages.copy_pages(pairs)
        behind = len(self._info.groups)
        if pairs := [(copy.source, copy.target) for copy in copies if copy.group == behind]:
            assert self._model.states is not None, "slots are copied of a model that has no state"
            self._model.states.copy_slots(pairs)

    def _run_greedy(self, batch: Batch, states: Sequence[SampleState]) -> RunOutput:
        """Every token is the position of its row's largest logit, and nobody asks for more."""
        rows, which = _each_once(batch.sample_rows)
        drawn: list[Sampled] = []  # one for each of rows
        failed: list[int] = []
        for first, stop, part in self._begin_slices(batch):
            token_ids, wanted = batch.token_ids, rows
            if part is not batch.attention:
                token_ids, wanted = token_ids[first:stop], _rows_between(rows, first, stop, batch) - first
            if not len(wanted):
                failed += self._write(token_ids, part, first)
                continue
            out = self._model.forward_greedy(token_ids, part, wanted)
            failed += self._evaluate(out, first)
            tokens, logits = out
            drawn += greedy_samples(tokens.tolist(), logits.tolist())
        samples = drawn if isinstance(which, range) else [drawn[i] for i in which]
        assert len(samples) == len(states), "a token is drawn for each state"
        return RunOutput(with_failures(samples, batch, failed), tuple(failed))

    def _run_sampling(self, batch: Batch, states: Sequence[SampleState]) -> RunOutput:
        rows = batch.sample_rows if batch.scored is None else np.r_[batch.sample_rows, batch.scored.rows]
        rows, _ = _each_once(rows)
        samples: dict[int, Sampled] = {}  # by the index of their state
        scores: list[TokenLogprob] = []
        hidden: list[npt.NDArray[np.float32]] = []
        failed: list[int] = []
        for first, stop, part in self._begin_slices(batch):
            wanted = _rows_between(rows, first, stop, batch)
            kept = NO_ROWS
            if batch.embedded is not None:
                kept = _rows_between(batch.embedded, first, stop, batch) - first
            if len(kept):
                drawn_rows = wanted - first if len(wanted) else FIRST_ROW
                out, states_of = self._model.forward_and_hidden(
                    batch.token_ids[first:stop], part, drawn_rows, kept
                )
                failed += self._evaluate([out, states_of], first)
                hidden.append(np.array(states_of))
            elif len(wanted):
                out = self._model.forward(batch.token_ids[first:stop], part, wanted - first)
                failed += self._evaluate([out], first)
            else:
                failed += self._write(batch.token_ids[first:stop], part, first)
            if not len(wanted):
                continue
            which = [i for i, row in enumerate(batch.sample_rows.tolist()) if first <= row < stop]
            places = np.searchsorted(wanted, batch.sample_rows[which]).tolist()
            samples.update(
                zip(which, self._sampling.draw(out, places, [states[i] for i in which]), strict=True)
            )
            if batch.scored is not None:
                scores += self._score(batch.scored, out, wanted.tolist(), failed)
        drawn = [samples[i] for i, _ in enumerate(states)]
        return RunOutput(
            with_failures(drawn, batch, failed),
            tuple(failed),
            tuple(scores),
            np.concatenate(hidden) if hidden else None,
        )

    def _score(
        self, scored: ScoredRows, logits: mx.array, rows: list[int], failed: list[int]
    ) -> Iterator[TokenLogprob]:
        """Of those rows that are there, in the order of ``logits``; rows that are not finite join the
        failed ones."""
        places = {row: place for place, row in enumerate(rows)}
        asked = zip(scored.rows.tolist(), scored.targets.tolist(), scored.num_top.tolist(), strict=True)
        there = [(row, Target(places[row], token, num_top)) for row, token, num_top in asked if row in places]
        found = self._sampling.score(logits, [target for _, target in there])
        for (row, target), score in zip(there, found, strict=True):
            if score is None:
                failed.append(row)
            yield TokenLogprob(target.token, -np.inf) if score is None else score

    def _write(self, token_ids: Ints, part: StepRows, first: int) -> list[int]:
        """Compute a slice of the step that nobody wants anything of; as ``_evaluate``."""
        self._model.write(token_ids, part)
        return self._evaluate([], first)

    def _evaluate(self, out: list[mx.array], first: int) -> list[int]:
        """Compute the slice of the step that begins at row ``first``; its rows that failed, as rows
        of the step."""
        self._model.evaluate(out)
        rows = self._model.nonfinite_rows()
        return [first + row for row in rows] if rows else rows

    @functools.cached_property
    def page_layout_key(self) -> PageLayoutKey:
        """Computed when it is first asked for: it reads all weights on disk."""
        name = model_fingerprint(self._info.path, weights=self._info.weights, exact=self._exact)
        specs = tuple(storage.spec for storage in self.storages) or (self._spec_of_no_layers,)
        residual = any(isinstance(group, ResidualWindow) for group in self._info.groups)
        context = f"quantize_after {self._info.quantize_after}" if residual else ""
        return PageLayoutKey(name, specs, context, self._state_kind())

    @property
    def _spec_of_no_layers(self) -> PoolSpec:
        """Of a model without attention: its pages have no bytes."""
        return PoolSpec(
            layers=(),
            num_pages=self._info.num_pages,
            page_size=self._info.page_size,
            k_format="bf16",
            v_format="bf16",
        )

    def _state_kind(self) -> StateKind | None:
        states = self._model.states
        if states is None:
            return None
        entries = tuple(
            (name, tuple(entry.shape), str(entry.dtype).removeprefix("mlx.core."))
            for name, entry in sorted(states.stored_entries.items())
        )
        return StateKind(self._info.page_size, entries, states.snapshot_bytes)

    def read_pages(self, pages: Sequence[int], group: int) -> PageBytes:
        if self._model.states is not None and group == len(self._info.groups):
            return self._model.states.read_slots(pages)
        if not self.storages:
            return np.empty((len(pages), 0), np.uint8)
        return self.storages[group].read_pages(pages)

    def write_pages(self, pages: Sequence[int], data: PageBytes, group: int) -> None:
        if self._model.states is not None and group == len(self._info.groups):
            self._model.states.write_slots(pages, data)
        elif self.storages:
            self.storages[group].write_pages(pages, data)

    @property
    def storages(self) -> tuple[PageStorage, ...]:
        """Pages of each group, then of each residual window."""
        return self._model.kv_cache.storages

    def _begin_slices(self, batch: Batch) -> Iterator[tuple[int, int, StepRows]]:
        """Rows [first, stop) that are computed at once, in order; the KV cache has begun their step."""
        size = total = len(batch.token_ids)
        if self._dense_row_bytes is None and batch.scored is None:  # as nearly all steps
            self._model.kv_cache.begin_step(batch.attention)
            yield 0, total, batch.attention
            return
        if self._dense_row_bytes is not None:
            size = max(1, GATHER_BYTES // (self._dense_row_bytes * int(batch.attention.kv_len.max())))
        if batch.scored is not None:  # logits of whole prompts at once would be many times a step's memory
            size = min(size, max(1, LOGIT_BYTES // (4 * self._info.vocab_size)))
        for first in range(0, total, size):
            stop = min(first + size, total)
            part = slice_rows(batch.attention, first, stop)
            self._model.kv_cache.begin_step(part)
            yield first, stop, part

    def close(self) -> None:
        """Drop the weights and the pool; the runner must not be used afterwards."""
        del self._model, self.head
        mx.clear_cache()
        release_kept_memory(self._info.backend)


def greedy_samples(tokens: Any, logits: Any) -> list[Sampled]:
    """Those of plain greedy rows, of which these are the largest logits (NaN if any of a row is)."""
    rows = zip(tokens, logits, strict=True)
    return [
        Sampled(token) if math.isfinite(logit) else Sampled(None, error=NOT_FINITE) for token, logit in rows
    ]


def _each_once(rows: Ints) -> tuple[Ints, Sequence[int]]:
    """The rows in rising order, each once, and where each of ``rows`` is among them."""
    if rows is counting(len(rows)) or all(a < b for a, b in itertools.pairwise(rows.tolist())):
        return rows, range(len(rows))  # as in every step of decodes
    once, places = np.unique(rows, return_inverse=True)
    return once, places.tolist()


def _rows_between(rows: Ints, first: int, stop: int, batch: Batch) -> Ints:
    """Those that lie in ``[first, stop)``."""
    whole = first == 0 and stop == len(batch.token_ids)
    return rows if whole else rows[(rows >= first) & (rows < stop)]
