"""The engine's loop on its one thread: plan, build batch, submit, commit, publish. No await."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from octavo.block_manager import BlockManager
from octavo.scheduler import SampleResult, Scheduler, SchedulerOutput, Sequence

from ..api.engine_info import EngineInfo
from ..api.outputs import Delta, FinishReason
from ..api.sampling_params import Speculate
from ..api.stats import Gauges, Observer
from ..api.store_counters import StoreCounts
from ..api.swap_counters import SwapCounts
from ..executor.base import ModelRunner, Pending, RunOutput
from ..executor.batch import Batch, build_batch
from ..executor.sampling.sampler import Sampled, SampleState
from ..inspection.prefix_cache_inspector import PrefixCacheInspector
from ..kv_store.transfer import PageTransfer
from ..speculation.drafting import Speculation
from ..tokenizer.tokenizer import Tokenizer
from .draft_tables import BatchDrafter
from .guessing import ModelGuesses
from .hidden_rows import NOBODY, HiddenRows, Wanted
from .mtp_drafts import MTPDrafts
from .overlap import may_overlap
from .prompt_embeddings import PromptEmbeddings
from .prompt_logprobs import PromptScores
from .request import Request, Sample, Update
from .step_stats import StepStats
from .tenant_loads import TenantLoads

logger = logging.getLogger(__name__)

Draws = list[tuple[Sequence, tuple[int, ...]]]  # see ``SchedulerOutput.draws``


class _InFlight(NamedTuple):
    """A step that the runner has and the scheduler waits for. ``draws``: those of the step."""

    step: SchedulerOutput
    draws: Draws
    batch: Batch
    pending: Pending
    hidden: HiddenRows


class EngineCore:
    """Serves requests on the thread that built its runner; nothing here is thread-safe,
    except reading ``gauges`` and ``step_seconds``. What is asked of the cache comes between two steps.

    What concerns one request ends that request; whatever else goes wrong leaves ``step`` as an
    exception, and then nobody may use this core again.

    speculate      what drafts for requests that do not say
    draft_tokens   drafts of a sequence in one step, at most
    draft_model    drafts for requests that do not say, if there is one: a model, or a head of the runner's
    overlaps       a step may be submitted before the one before it is resolved, see overlap.py
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        blocks: BlockManager,
        scheduler: Scheduler,
        *,
        transfer: PageTransfer,
        store_counts: Callable[[], StoreCounts] | None = None,
        swap_counts: Callable[[], SwapCounts] | None = None,
        observer: Observer | None = None,
        speculate: Speculate = "off",
        draft_tokens: int = 8,
        draft_model: BatchDrafter | None = None,
        overlaps: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokenizer = tokenizer
        self.cache = PrefixCacheInspector(blocks)
        self._runner = runner
        self._blocks = blocks
        self._scheduler = scheduler
        self._stats = StepStats(observer)
        self._clock = clock
        self._speculation = Speculation("draft" if draft_model else speculate, most=draft_tokens, clock=clock)
        self._draft_model = draft_model
        self._guesses = ModelGuesses(draft_model, clock)
        self._overlaps = overlaps
        self._in_flight: _InFlight | None = None  # between two calls of ``step``
        self._samples: dict[Sequence, Sample] = {}  # of every sample that has not ended
        self._scores = PromptScores()
        self._embeddings = PromptEmbeddings()
        self._updates: list[Update] = []  # since the last step returned
        self._ended: list[str] = []  # ids of requests, likewise
        self._said: list[Sample] = []  # that have ended, and whose drafting does not know it yet
        self._store_counts, self._swap_counts = store_counts, swap_counts
        self.transfer = transfer
        self.passed: Callable[[str], None] | None = None  # is told of every part of a step that is done
        self._tenants = TenantLoads(scheduler, clock)
        self.gauges = self._measure()
        self._step_began: float | None = None  # of the step that is being computed, by ``clock``

    @property
    def info(self) -> EngineInfo:
        return self._runner.info

    @property
    def capacity(self) -> int:
        """Positions that one sequence can have room for, whatever is pinned."""
        return self._blocks.capacity

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do something."""
        return bool(self._updates) or self._in_flight is not None or self._scheduler.has_work

    @property
    def step_seconds(self) -> float:
        """How long the step that is being computed has taken so far; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else self._clock() - began

    def on_news(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, from another thread, when ``has_work`` has become true by itself."""
        self._scheduler.on_news(wake)

    def add(self, request: Request) -> None:
        """Queue a request. Raises SequenceTooLong if it could never fit the page pool."""
        first, *others = request.samples
        first.sequence.parallel_samples.extend(sample.sequence for sample in others)
        self._scheduler.add(first.sequence)
        self._samples.update((sample.sequence, sample) for sample in request.samples)
        made = self._speculation.begin(
            request.params.speculate,
            [sample.state.constraint for sample in request.samples],
            num_prompt=request.num_prompt,
            owner=(first.sequence.tenant, first.sequence.salt),
        )
        for sample, drafting in zip(request.samples, made, strict=True):
            sample.drafting = drafting
            self._guesses.begin(sample)

    def abort(self, request: Request) -> None:
        """End what is left of a request: its pages are idle when this returns."""
        for sample in reversed(request.samples):  # the parent last: none takes its place
            if sample.sequence in self._samples:
                self._scheduler.abort(sample.sequence)
                self._tell(sample, sample.abort())

    def step(self) -> list[Update]:
        """Advance every running request once; what is new since the last call."""
        began = self._step_began = self._clock()
        flight = self._in_flight or self._submit(self._plan(began))
        self._in_flight = None if flight is None else self._submit_ahead(flight)
        if flight is not None:
            self._commit(flight)
        return self._publish(flight, began)

    def settle(self) -> None:
        """Resolve the step in flight, if there is one: its pages are as the scheduler has them. What is new
        is returned by the next ``step``."""
        flight, self._in_flight = self._in_flight, None
        if flight is not None:
            began = self._clock()
            self._commit(flight)
            self._updates = self._publish(flight, began)

    def _plan(self, now: float) -> SchedulerOutput | None:
        step = self._scheduler.plan(now)
        self._pass("plan")
        if step is None:
            self._fail_stuck()
        elif not step.plain:
            self._note_arrivals(step, now)
        return step

    def _fail_stuck(self) -> None:
        """End the requests that the scheduler cannot serve, so that later ones are served."""
        stuck = self._scheduler.stuck()
        if not stuck:
            return
        logger.error("no step is planned and %d sequences cannot go on: their requests fail", len(stuck))
        for request in {self._samples[sequence].request: None for sequence in stuck}:
            self._fail(request, "the scheduler planned no step for this request, which is a bug of Octavo")

    def _submit_ahead(self, flight: _InFlight) -> _InFlight | None:
        """Submit the step after one in flight, where nothing in it depends on what that gives but its
        tokens; None where it has to wait."""
        if not self._overlaps or not flight.pending.feeds:
            return None
        if not may_overlap(flight.batch, flight.step, self._samples):
            return None
        step = self._scheduler.plan_ahead()
        self._pass("plan")
        return self._submit(step, flight.pending)

    def _build_batch(self, step: SchedulerOutput, hidden: HiddenRows) -> Batch:
        batch = build_batch(step, self._blocks.page_size, self._blocks.groups)
        if not step.plain and (scored := self._scores.rows_of(step, self._samples)) is not None:
            batch = batch._replace(scored=scored)
        if (embedded := hidden.rows) is not None:
            batch = batch._replace(hidden=embedded)
        self._pass("batch")
        return batch

    def _hidden_rows(self, step: SchedulerOutput) -> HiddenRows:
        """Whose hidden states the step is asked for."""
        drafts = self._draft_model
        if step.plain and drafts is None:
            return NOBODY
        wanted: list[Wanted] = []
        if not step.plain and (rows := self._embeddings.rows_of(step, self._samples)) is not None:
            wanted.append((rows, self._embeddings.record))
        if isinstance(drafts, MTPDrafts) and (rows := drafts.rows_of(step)) is not None:
            wanted.append((rows, drafts.record))
        return HiddenRows(tuple(wanted))

    def _submit(self, step: SchedulerOutput | None, after: Pending | None = None) -> _InFlight | None:
        if step is None:
            return None
        hidden = self._hidden_rows(step)
        batch = self._build_batch(step, hidden)
        states: list[SampleState] = []
        draws = step.draws()
        for sequence, drafts in draws:
            state = self._samples[sequence].state
            if after is not None:
                state = state.after((0,))  # whatever it is: see ``SampleState.is_foreseen``
            states.append(state)
            if drafts:
                states += [state.after(drafts[: count + 1]) for count in range(len(drafts))]
        pending = self._runner.submit(batch, states, after)
        self._pass("run")
        return _InFlight(step, draws, batch, pending, hidden)

    def _commit(self, flight: _InFlight) -> None:
        step, output = flight.step, flight.pending.resolve()
        self._pass("run")
        if output.scores:
            self._scores.record(output.scores)
        if output.hidden is not None:
            flight.hidden.deliver(output.hidden)
        results = self._accept(flight, output)
        self._pass("accept")
        self._scheduler.commit(step, results)
        self._prepare(flight)
        self._pass("commit")

    def _publish(self, flight: _InFlight | None, began: float) -> list[Update]:
        step, seconds = None if flight is None else flight.step, self._clock() - began
        if step is not None:
            bare = self._guesses.time_without(seconds)
            self._scheduler.observe(step, bare, num_steps=self._speculation.num_steps)
        updates = self._report(step, seconds)
        self._pass("report")
        self._step_began = None
        return updates

    def _pass(self, part: str) -> None:
        if self.passed is not None:
            self.passed(part)

    def measure(self) -> None:
        """Bring ``gauges`` up to date."""
        self.gauges = self._measure()

    def finish(self) -> list[Update]:
        """Abort whatever is left; the last news."""
        self.settle()
        for request in {sample.request: None for sample in self._samples.values()}:
            self.abort(request)
        return self._report(None, 0.0)

    def close(self) -> None:
        """Give the model and its pool back. No step may follow."""
        self._in_flight = None
        self._scheduler.close()
        if self._draft_model is not None:
            self._draft_model.shut_down()
        self._runner.close()

    def _report(self, step: SchedulerOutput | None, seconds: float) -> list[Update]:
        self.measure()
        for request_id in self._ended:
            self.cache.lookups.ended(request_id)
        self._ended.clear()
        self._stats.publish(step, seconds, self.gauges, self._blocks.num_evicted)
        updates, self._updates = self._updates, []
        return updates

    def _accept(self, flight: _InFlight, output: RunOutput) -> list[SampleResult]:
        """Give every sample its token; what the scheduler must know of each."""
        if output.failed_rows:
            self._fail_unsampled(flight.step, flight.batch, output.failed_rows)
        now = self._clock()
        results = []
        drawn = iter(output.samples)
        for index, (sequence, drafts) in enumerate(flight.draws):
            sample = self._samples.get(sequence)
            if (
                sample is None or index in output.void
            ):  # it ended while the step was in flight, or is repeated
                next(drawn)
                results.append(SampleResult(None, void=True))
            elif drafts:
                results.append(self._take_run(sample, drafts, [next(drawn) for _ in (None, *drafts)], now))
            else:
                results.append(self._take(sample, next(drawn), now))
        assert next(drawn, None) is None, "more was drawn than asked for"
        return results

    def _take(self, sample: Sample, sampled: Sampled, now: float) -> SampleResult:
        """Give a sample its next token."""
        delta = _advance(sample, sampled)
        failed = delta.error is not None
        if not failed:
            self._stats.token(sample, now)
        self._tell(sample, delta)
        return SampleResult(None if failed else sampled.token, delta.finish_reason is not None)

    def _take_run(
        self, sample: Sample, drafts: tuple[int, ...], drawn: list[Sampled], now: float
    ) -> SampleResult:
        """Give a sample the tokens that were drawn beside its drafts: the next one, and each one after a
        draft that is the token before it."""
        tokens: list[int] = []
        last = SampleResult(None)
        for draft, sampled in zip((*drafts, None), drawn, strict=True):
            if tokens and sampled.invalid:
                break  # the next step draws it again, and says what is wrong
            last = self._take(sample, sampled, now)
            if last.token is None:
                break
            tokens.append(last.token)
            if last.finished or last.token != draft:
                break
        self._stats.drafted(len(drafts), max(0, len(tokens) - 1))
        return last if last.token is None else SampleResult(tokens[0], last.finished, tuple(tokens[1:]))

    def _prepare(self, flight: _InFlight) -> None:
        """Begin what the next tokens need, when all of this step are known: accepting a token waits for masks
        of its grammar."""
        if self._said:
            for ended in self._said:
                if ended.drafting is not None:
                    ended.drafting.finished(ended.sequence.tokens)
            self._said.clear()
        samples = self._samples
        going_on = [sample for each, _ in flight.draws if (sample := samples.get(each)) is not None]
        if self._speculation.begin_step() and (
            drafting := [sample for sample in going_on if sample.drafting is not None]
        ):
            times = self._scheduler.draft_times
            self._guesses.guess(going_on, times.cost)
            self._speculation.allot(drafting, len(going_on), times)
        for sample in going_on:
            if sample.state.constraint is not None:
                sample.state.constraint.prepare(sample.sequence.drafts)

    def _fail_unsampled(self, step: SchedulerOutput, batch: Batch, failed_rows: tuple[int, ...]) -> None:
        """End the sequences whose K/V went wrong in the middle of the prompt.

        Nothing of this step is published to the prefix cache yet. Those that sampled have a failed sample.
        """
        ends = batch.attention.q_start[1:].tolist()
        failed = {next(index for index, end in enumerate(ends) if row < end) for row in failed_rows}
        for item in (step.work[index] for index in sorted(failed)):
            if item.samples or item.sequence not in self._samples:
                continue
            request = self._samples[item.sequence].request
            self._fail(request, "the model computed NaN or infinity for this prompt")

    def _fail(self, request: Request, message: str) -> None:
        """End all that is left of a request with an error."""
        for sample in reversed(request.samples):  # the parent last: none takes its place
            if sample.sequence in self._samples:
                self._scheduler.abort(sample.sequence)
                self._tell(sample, sample.fail(message))

    def _tell(self, sample: Sample, delta: Delta) -> None:
        request = sample.request
        self._updates.append(Update(request, delta))
        if delta.finish_reason is not None:
            del self._samples[sample.sequence]
            self._guesses.end(sample)
            if sample.drafting is not None and delta.finish_reason is not FinishReason.ERROR:
                self._said.append(sample)
            if (reason := request.finish_reason) is not None:
                self._stats.ended(request, reason, self._clock())
                self._ended.append(request.request_id)

    def _note_arrivals(self, step: SchedulerOutput, now: float) -> None:
        for lookup in step.lookups:
            self.cache.record(self._samples[lookup.sequence].request.request_id, lookup)
        for item in step.work:
            if item.start < item.sequence.num_prompt:
                request = self._samples[item.sequence].request
                if request.started_at is None:
                    self._stats.started(request, now)

    def _measure(self) -> Gauges:
        scheduler, blocks = self._scheduler, self._blocks
        held, idle_cached, idle_empty = blocks.counts
        return Gauges(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            pages_held=held,
            pages_idle_cached=idle_cached,
            pages_idle_empty=idle_empty,
            residual=blocks.residual_counts,
            states=blocks.state_counts,
            store=self._store_counts() if self._store_counts is not None else None,
            swap=self._swap_counts() if self._swap_counts is not None else None,
            prompt_token_s=scheduler.prompt_pace.token_s,
            prompt_miss_share=scheduler.prompt_pace.miss_share,
            tenants=self._tenants.measure(),
        )


def _advance(sample: Sample, sampled: Sampled) -> Delta:
    """``sample.accept``, where trouble with one request's output ends that request only."""
    try:
        return sample.accept(sampled)
    except Exception as error:
        logger.exception("request %s failed while its output was made", sample.request.request_id)
        return sample.fail(f"making the output failed: {error}")
