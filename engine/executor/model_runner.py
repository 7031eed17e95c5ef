from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import mlx.core as mx
import numpy as np

from octavo.block_manager import ResidualWindow
from octavo.kernels.backends import release_kept_memory
from octavo.kernels.interface import PageStorage, PoolSpec
from octavo.kernels.page_bytes import PageBytes

from ..api.engine_info import EngineInfo
from ..api.outputs import TokenLogprob
from ..kv_store.fingerprint import model_fingerprint
from ..kv_store.page_runs import PageLayoutKey, StateKind
from .adapters.slots import AdapterSlots
from .base import Pending, Resolved, RunOutput, joined, with_failed_rows
from .batch import Batch, OutputSelection, each_once
from .device_step import DeviceStep
from .forward_outputs import Outputs
from .mtp.head import MTPRunner
from .paged_model import ALL_ROWS, PagedModel
from .recurrent.state_pool import StatePool
from .sampling.logit_rows import Sampler, Target
from .sampling.sampler import Sampled, SampleState, greedy_samples
from .vision.encoder import ImageEncoder

LOGIT_BYTES = 64 * 1024**2  # bytes of float32 logits
GATHER_BYTES = 256 * 1024**2


class PagedRunner:
    def __init__(
        self,
        model: PagedModel,
        info: EngineInfo,
        *,
        gathered_row_bytes: int | None,
        exact: bool = False,
        groups: Sequence[int] | None = None,
        gives_logits: bool = True,
        fused_argmax: bool = False,
        sampling: Sampler | None = None,
        on_device: bool = False,
        feeds: bool = False,
        head: MTPRunner | None = None,
        adapters: AdapterSlots | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        self.head = head
        self.adapters = adapters
        self.images = images
        self._model = model
        self._info = info
        self._exact = exact
        self.storages = model.kv_cache.storages
        groups = range(len(info.groups)) if groups is None else groups
        self._stored: dict[int, PageStorage | StatePool] = dict(
            zip(groups, self.storages, strict=bool(self.storages))
        )
        if model.states is not None:
            self._stored[len(info.groups)] = model.states
        self._gathered_row_bytes = gathered_row_bytes
        self._gives_logits = gives_logits
        self._fused_argmax = fused_argmax
        self._on_device = on_device and gathered_row_bytes is None and not model.computes_apart
        self._feeds = feeds
        self._sampling = sampling or Sampler()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(
        self, batch: Batch, states: Sequence[SampleState] | None, after: Pending | None = None
    ) -> Pending:
        """Submit a step; ``states`` is None if another rank samples.

        Raises ValueError for unknown token ids or pages.
        """
        self._check_tokens(batch)
        for group, stored in self._stored.items() if batch.copies else ():
            if pairs := [(copy.source, copy.target) for copy in batch.copies if copy.group == group]:
                stored.copy_pages(pairs)
        if self._on_device and states and batch.only_samples:
            return self._launch(batch, states, cast("DeviceStep | None", after))
        assert after is None, "this step must be submitted before it is computed"
        size = self._rows_at_once(batch)
        if size >= len(batch.token_ids):
            return Resolved(with_failed_rows(batch, self._run(batch, states)))
        runs = []
        for first, samples, part in batch.slices(size):
            run = self._run(part, states and [states[i] for i in samples])
            runs.append(run._replace(failed_rows=tuple(first + row for row in run.failed_rows)))
        return Resolved(with_failed_rows(batch, joined(runs)))

    def run(self, batch: Batch, states: Sequence[SampleState] | None) -> RunOutput:
        return self.submit(batch, states).resolve()

    def _check_tokens(self, batch: Batch) -> None:
        vocab_size = self._info.vocab_size
        token_ids = batch.token_ids.tolist()
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= vocab_size:
            raise ValueError(f"token ids must lie in [0, {vocab_size}), got values from {low} to {high}")

    def _rows_at_once(self, batch: Batch) -> int:
        size = len(batch.token_ids)
        if self._gathered_row_bytes is not None:
            size = max(1, GATHER_BYTES // (self._gathered_row_bytes * int(batch.attention.kv_len.max())))
        if batch.scored is not None:  # logits of whole prompts would take many times a step's memory
            size = min(size, max(1, LOGIT_BYTES // (4 * self._info.vocab_size)))
        return size

    def _launch(self, batch: Batch, states: Sequence[SampleState], after: DeviceStep | None) -> DeviceStep:
        rows, places = each_once(batch.sample_rows)
        token_ids = None
        if after is not None:
            assert batch.sources is not None, "the tokens to verify are not known"
            token_ids = after.take(batch.sources)
        logits = self._model.forward(batch, OutputSelection(rows), token_ids).logits
        assert logits is not None
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

    def _run(self, batch: Batch, states: Sequence[SampleState] | None) -> RunOutput:
        scored = batch.scored
        rows, places = each_once(
            batch.sample_rows if scored is None else np.r_[batch.sample_rows, scored.rows]
        )
        greedy = self._fused_argmax and batch.only_samples and len(rows) > 0
        greedy = greedy and states is not None and all(state.is_argmax for state in states)
        wanted = OutputSelection(rows, greedy, batch.hidden, head=states is not None)
        outputs = self._model.forward(batch, wanted if self._gives_logits else ALL_ROWS)
        self._model.evaluate(outputs.arrays)
        failed = self._model.nonfinite_rows()
        if not self._gives_logits:
            assert outputs.logits is not None
            bits = np.array(outputs.logits.view(mx.int32)).view(np.float32)
            return RunOutput((), tuple(failed), hidden=bits)
        if states is None:
            return RunOutput((), tuple(failed))
        num_samples = len(batch.sample_rows)
        samples = self._sample(outputs, places[:num_samples], states)
        scores: tuple[TokenLogprob, ...] = ()
        if scored is not None and outputs.logits is not None:
            asked = zip(places[num_samples:], scored.targets.tolist(), scored.num_top.tolist(), strict=True)
            found = self._sampling.score(outputs.logits, [Target(*each) for each in asked])
            failed += [row for row, score in zip(scored.rows.tolist(), found, strict=True) if score is None]
            scores = tuple(
                TokenLogprob(target, -np.inf) if score is None else score
                for target, score in zip(scored.targets.tolist(), found, strict=True)
            )
        hidden = None if outputs.hidden is None else np.array(outputs.hidden)
        return RunOutput(tuple(samples), tuple(failed), scores, hidden)

    def _sample(
        self, outputs: Outputs, places: Sequence[int], states: Sequence[SampleState]
    ) -> Sequence[Sampled]:
        assert len(places) == len(states), "there must be one sampled token per state"
        if outputs.choice is not None:
            sampled = greedy_samples(*(each.tolist() for each in outputs.choice))
            return sampled if isinstance(places, range) else [sampled[place] for place in places]
        if outputs.logits is None or not states:
            return ()
        return self._sampling.sample(outputs.logits, places, states)

    @functools.cached_property
    def page_layout_key(self) -> PageLayoutKey:
        """Key of the page layout. Hashes the weights on first use."""
        name = model_fingerprint(self._info.path, weights=self._info.weights, exact=self._exact)
        return replace(self.page_shape, model=name)

    @property
    def page_shape(self) -> PageLayoutKey:
        num_pages, page_size = self._info.num_pages, self._info.page_size
        none = PoolSpec(layers=(), num_pages=num_pages, page_size=page_size, k_format="bf16", v_format="bf16")
        groups, states = self._info.groups, self._model.states
        specs = tuple(getattr(self._stored.get(i), "spec", none) for i in range(len(groups)))
        windows = [group for group in groups if isinstance(group, ResidualWindow)]
        kinds = () if states is None else (StateKind(page_size, states.layout, states.snapshot_bytes),)
        return PageLayoutKey("", specs, windows[0].context if windows else "", kinds)

    def read_pages(self, pages: Sequence[int], group: int) -> PageBytes:
        if (stored := self._stored.get(group)) is None:
            return np.empty((len(pages), 0), np.uint8)
        return stored.read_pages(pages)

    def write_pages(self, pages: Sequence[int], data: PageBytes, group: int) -> None:
        if (stored := self._stored.get(group)) is not None:
            stored.write_pages(pages, data)

    def close(self) -> None:
        del self._model, self._stored, self.storages, self.head, self.adapters, self.images
        mx.clear_cache()
        release_kept_memory(self._info.backend)
