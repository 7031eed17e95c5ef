from __future__ import annotations

import logging
from collections.abc import Callable

from octavo.scheduler import SampleResult, Scheduler, SchedulerOutput, Sequence

from ..api.outputs import Delta
from ..executor.base import RunOutput
from ..executor.batch import Batch
from ..executor.sampling.sampler import Sampled, SampleState
from .request import Request, Sample, Update
from .step_parts import StepParts
from .step_stats import StepStats


class BegunRequests:
    """Numbers of the requests whose prompts have begun; ``numbers`` has an ended request once more."""

    def __init__(self) -> None:
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._numbers: frozenset[int] | None = frozenset()

    def begin(self, number: int) -> None:
        self._begun.add(number)
        self._numbers = None

    def end(self, number: int) -> None:
        self._ended.add(number)
        self._numbers = None

    def numbers(self) -> frozenset[int]:
        if self._numbers is None:
            numbers = frozenset(self._begun)
            self._numbers = None if self._ended else numbers
            self._begun -= self._ended
            self._ended.clear()
            return numbers
        return self._numbers


logger = logging.getLogger(__name__)

SampledSequences = list[tuple[Sequence, tuple[int, ...]]]


class LiveSamples:
    """Unfinished samples. An error of one request ends only that request."""

    def __init__(
        self, scheduler: Scheduler, parts: StepParts, stats: StepStats, clock: Callable[[], float]
    ) -> None:
        self.by_sequence: dict[Sequence, Sample] = {}
        self.updates: list[Update] = []
        self.begun = BegunRequests()
        self._ended: list[str] = []
        self._scheduler = scheduler
        self._parts = parts
        self._stats = stats
        self._clock = clock

    def add(self, request: Request) -> None:
        first, *others = request.samples
        first.sequence.parallel_samples.extend(sample.sequence for sample in others)
        self._scheduler.add(first.sequence)
        self.by_sequence.update((sample.sequence, sample) for sample in request.samples)
        self._parts.begin(request)

    def abort(self, request: Request) -> None:
        self._end(request, Sample.abort)

    def requests(self) -> list[Request]:
        return list({sample.request: None for sample in self.by_sequence.values()})

    def unfinished(self, sequences: SampledSequences) -> list[Sample]:
        found = self.by_sequence.get
        return [sample for each, _ in sequences if (sample := found(each)) is not None]

    def got_tokens(self, sequences: SampledSequences, results: list[SampleResult]) -> list[Sample]:
        return self.unfinished(
            [draw for draw, result in zip(sequences, results, strict=True) if not result.discarded]
        )

    def states(self, sequences: SampledSequences, *, is_ahead: bool) -> list[SampleState]:
        samples, states = self.by_sequence, list[SampleState]()
        for sequence, drafts in sequences:
            state = samples[sequence].state
            if is_ahead:
                state = state.after((0,))
            states.append(state)
            if drafts:
                states += [state.after(drafts[: count + 1]) for count in range(len(drafts))]
        return states

    def take_ended(self) -> list[str]:
        ended = self._ended
        if ended:
            self._ended = []
        return ended

    def note_started(self, step: SchedulerOutput, now: float) -> None:
        for item in step.work:
            if item.start < item.sequence.num_prompt:
                request = self.by_sequence[item.sequence].request
                if request.started_at is None:
                    self._stats.started(request, now)
                    self.begun.begin(request.number)

    def accept(self, sequences: SampledSequences, output: RunOutput) -> list[SampleResult]:
        now = self._clock()
        results = []
        samples = iter(output.samples)
        for index, (sequence, drafts) in enumerate(sequences):
            sample = self.by_sequence.get(sequence)
            if sample is None or index in output.discarded:
                next(samples)
                results.append(SampleResult(None, discarded=True))
                continue
            sampled = next(samples)
            run = [sampled, *(next(samples) for _ in drafts)] if drafts else None
            if sampled.is_late:
                results.append(SampleResult(None, discarded=True))
            elif run:
                results.append(self._accept_drafts(sample, drafts, run, now))
            else:
                results.append(self._accept(sample, sampled, now))
        assert next(samples, None) is None, "more tokens were sampled than planned"
        return results

    def _accept(self, sample: Sample, sampled: Sampled, now: float) -> SampleResult:
        delta = _advance(sample, sampled)
        failed = delta.error is not None
        if not failed:
            self._stats.token(sample, now)
        self._emit(sample, delta)
        return SampleResult(None if failed else sampled.token, delta.finish_reason is not None)

    def _accept_drafts(
        self, sample: Sample, drafts: tuple[int, ...], samples: list[Sampled], now: float
    ) -> SampleResult:
        tokens: list[int] = []
        last = SampleResult(None)
        for draft, sampled in zip((*drafts, None), samples, strict=True):
            if tokens and (sampled.invalid or sampled.is_late):
                break
            last = self._accept(sample, sampled, now)
            if last.token is None:
                break
            tokens.append(last.token)
            if last.finished or last.token != draft:
                break
        self._stats.drafted(len(drafts), max(0, len(tokens) - 1))
        return last if last.token is None else SampleResult(tokens[0], last.finished, tuple(tokens[1:]))

    def fail_unsampled(self, step: SchedulerOutput, batch: Batch, failed_rows: tuple[int, ...]) -> None:
        ends = batch.attention.q_start[1:].tolist()
        failed = {next(index for index, end in enumerate(ends) if row < end) for row in failed_rows}
        for item in (step.work[index] for index in sorted(failed)):
            if not item.samples and item.sequence in self.by_sequence:
                request = self.by_sequence[item.sequence].request
                self._fail(request, "the model computed NaN or infinity for this prompt")

    def fail_stuck(self) -> None:
        stuck = self._scheduler.stuck()
        if not stuck:
            return
        logger.error(
            "no step was planned although %d sequences have work left; these requests fail", len(stuck)
        )
        for request in {self.by_sequence[sequence].request: None for sequence in stuck}:
            self._fail(request, "the scheduler planned no step for this request, which is a bug of Octavo")

    def _fail(self, request: Request, message: str) -> None:
        self._end(request, lambda sample: sample.fail(message))

    def _end(self, request: Request, how: Callable[[Sample], Delta]) -> None:
        for sample in reversed(request.samples):
            if sample.sequence in self.by_sequence:
                self._scheduler.abort(sample.sequence)
                self._emit(sample, how(sample))

    def _emit(self, sample: Sample, delta: Delta) -> None:
        request = sample.request
        self.updates.append(Update(request, delta))
        if delta.finish_reason is not None:
            del self.by_sequence[sample.sequence]
            self._parts.end(sample)
            if (reason := request.finish_reason) is not None:
                self._stats.ended(request, reason, self._clock())
                self._ended.append(request.request_id)
                self.begun.end(request.number)


def _advance(sample: Sample, sampled: Sampled) -> Delta:
    try:
        return sample.accept(sampled)
    except Exception as error:
        logger.exception("request %s failed while its output was being built", sample.request.request_id)
        return sample.fail(f"building the output failed: {error}")
