from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from octavo.block_manager import BlockManager
from octavo.scheduler import Scheduler, SchedulerOutput

from ..executor.base import ModelRunner, Pending
from ..executor.batch import Batch, build_batch
from ..inspection.prefix_cache_inspector import PrefixCacheInspector
from ..kv_store.shard_store import ShardStore
from ..kv_store.transfer import PageTransfer
from ..speculation.drafting import Speculation
from ..tokenizer.tokenizer import Tokenizer
from .draft_part import DraftPart
from .gauge_source import GaugeSource
from .live_samples import LiveSamples, SampledSequences
from .overlap import may_overlap
from .prompt_parts import Grammars, PromptEmbeddings, PromptScores
from .request import Request, RequestBuilder, Update
from .step_parts import NO_ROWS_REQUESTED, NONE_PAUSED, RequestedRows, StepPart, StepParts
from .step_stats import StepStats


class _InFlight(NamedTuple):
    step: SchedulerOutput
    sequences: SampledSequences
    batch: Batch
    pending: Pending
    requested: RequestedRows


class EngineCore:
    """Serves requests on one thread. Not thread-safe, except for ``gauges`` and ``step_seconds``.

    An error of one request ends that request. After an exception of ``step`` the core must not be used.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        blocks: BlockManager,
        scheduler: Scheduler,
        *,
        transfer: PageTransfer,
        drafts: DraftPart | None = None,
        gauge_source: GaugeSource | None = None,
        stats: StepStats | None = None,
        parts: tuple[StepPart, ...] = (),
        shards: ShardStore | None = None,
        overlaps: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info, self.tokenizer, self.capacity = runner.info, tokenizer, blocks.capacity
        self.cache = PrefixCacheInspector(blocks)
        self.transfer = transfer
        self.passed: Callable[[str], None] = lambda _: None
        self._runner = runner
        self._blocks = blocks
        self._scheduler = scheduler
        self.builder = RequestBuilder(runner.info, tokenizer, runner.adapters)
        self.parts = parts
        self.shards = shards
        self._stats = stats or StepStats(None)
        self._clock = clock
        self.drafts = drafts or DraftPart(Speculation("off"), None, scheduler, clock)
        grammars = Grammars(may_be_late=blocks.states is None)
        self._parts = StepParts((PromptScores(), PromptEmbeddings(), *parts, self.drafts, grammars))
        self._live = LiveSamples(scheduler, self._parts, self._stats, clock)
        self._overlaps = overlaps
        self._in_flight: _InFlight | None = None
        self._gauge_source = gauge_source or GaugeSource(blocks, scheduler, clock=clock)
        self.gauges = self._gauge_source.measure()
        self._step_began: float | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._live.updates or self._in_flight or self._scheduler.has_work)

    @property
    def step_seconds(self) -> float:
        """Seconds that the current step has taken; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else self._clock() - began

    def on_update(self, wake: Callable[[], None]) -> None:
        self._scheduler.on_update(wake)

    def add(self, request: Request) -> None:
        """Queue a request. Raises SequenceTooLong if the request can never fit the page pool."""
        self._live.add(request)

    def abort(self, request: Request) -> None:
        """End the remaining samples of a request and release its pages."""
        self._live.abort(request)

    def step(self) -> list[Update]:
        """Advance every running request by one step; return the updates since the last call."""
        self._step_began = self._clock()
        flight = self._in_flight or self._submit(self._plan(self._step_began))
        self._in_flight = self._submit_ahead(flight)
        self._commit(flight)
        return self._publish(flight, self._step_began)

    def settle(self) -> None:
        flight, self._in_flight = self._in_flight, None
        if flight:
            began = self._clock()
            self._commit(flight)
            self._live.updates = self._publish(flight, began)

    def _plan(self, now: float) -> SchedulerOutput | None:
        spent_s = 0.0
        if self._parts.live:
            spent_s = self._run_parts()
        else:
            self._scheduler.paused = NONE_PAUSED
        step = self._scheduler.plan(now, spent_s=spent_s)
        self.passed("plan")
        if not step and self._scheduler.is_blocked:
            if not spent_s:
                time.sleep(HELD_S)  # all sequences wait, for example for grammar masks
        elif not step:
            self._live.fail_stuck()
        elif not step.decode_only:
            for lookup in step.lookups:
                self.cache.record(self._live.by_sequence[lookup.sequence].request.request_id, lookup)
            self._live.note_started(step, now)
            self.gauges = self.gauges._replace(begun=self._live.begun.numbers())
        return step

    def _run_parts(self) -> float:
        began = self._clock()
        ready = self._parts.work(self._scheduler.spare_time)
        for sequence in ready or ():
            self._scheduler.retry(sequence)
        self._scheduler.paused = self._parts.paused()
        if ready is None:
            return 0.0
        self._step_began = self._clock()
        return self._step_began - began

    def _submit(self, step: SchedulerOutput | None, after: Pending | None = None) -> _InFlight | None:
        if not step:
            return None
        batch, requested = build_batch(step, self._blocks.page_size, self._blocks.groups), NO_ROWS_REQUESTED
        if self._parts.live:
            requested = self._parts.request_rows(step)
            batch = requested.added_to(batch)
        self.passed("batch")
        sequences = step.sampled_with_drafts()
        pending = self._runner.submit(batch, self._live.states(sequences, is_ahead=after is not None), after)
        self.passed("run")
        return _InFlight(step, sequences, batch, pending, requested)

    def _submit_ahead(self, flight: _InFlight | None) -> _InFlight | None:
        if not (flight and self._overlaps and flight.pending.feeds):
            return None
        if flight.requested.expects_results or not may_overlap(
            self._parts, self._live.unfinished(flight.sequences)
        ):
            return None
        step = self._scheduler.plan_ahead()
        self.passed("plan")
        return self._submit(step, flight.pending)

    def _commit(self, flight: _InFlight | None) -> None:
        if not flight:
            return
        output = flight.pending.resolve()
        self.passed("run")
        flight.requested.deliver(output)
        if output.failed_rows:
            self._live.fail_unsampled(flight.step, flight.batch, output.failed_rows)
        results = self._live.accept(flight.sequences, output)
        self.passed("accept")
        self._scheduler.commit(flight.step, results)
        if self._parts.live:
            self._parts.prepare(self._live.got_tokens(flight.sequences, results))
        self.passed("commit")

    def _publish(self, flight: _InFlight | None, began: float) -> list[Update]:
        step, seconds = flight and flight.step, self._clock() - began
        if step:
            self.drafts.observe(step, seconds)
        self.measure()
        updates, self._live.updates = self._live.updates, []
        for request_id in self._live.take_ended():
            self.cache.lookups.ended(request_id)
        self._stats.publish(step, seconds, self.gauges, self._blocks.num_evicted)
        self.passed("report")
        self._step_began = None
        return updates

    def measure(self) -> None:
        begun = self._live.begun.numbers()
        self.gauges = self._gauge_source.measure(pages_pinned=self.cache.num_pinned, begun=begun)

    def finish(self) -> list[Update]:
        """Abort all remaining requests; return the last updates."""
        self.settle()
        for request in self._live.requests():
            self.abort(request)
        return self._publish(None, self._clock())

    def close(self) -> None:
        self._in_flight = None
        self._scheduler.close()
        self._parts.close()
        self.builder.grammars.close()
        self._runner.close()


HELD_S = 0.002  # seconds: pause while all sequences wait
