from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from octavo.scheduler import ScheduledChunk, SchedulerOutput

from ..api.outputs import FinishReason
from ..api.stats import DraftRecord, Gauges, Observer, RequestRecord, StepRecord, TenantTokens
from .request import Request, Sample

logger = logging.getLogger(__name__)


class StepStats:
    """Collects the statistics of a step. ``now`` is in seconds of the engine's clock."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._num_evicted = 0
        self._num_generated = 0
        self._ttft_s: list[float] = []
        self._inter_token_s: list[float] = []
        self._queue_s: list[float] = []
        self._ended: list[RequestRecord] = []
        self._drafted: list[DraftRecord] = []
        self._tenant_outputs: Counter[str] = Counter()
        self._encoded_s: list[float] = []
        self._num_image_hits = 0

    def _forget(self) -> None:
        self._num_generated = 0
        for events in (self._ttft_s, self._inter_token_s, self._queue_s, self._ended, self._drafted):
            events.clear()
        self._tenant_outputs.clear()

    def encoded(self, seconds: float) -> None:
        self._encoded_s.append(seconds)

    def hit_image(self) -> None:
        self._num_image_hits += 1

    def drafted(self, num_drafts: int, num_accepted: int) -> None:
        self._drafted.append(DraftRecord(num_drafts, num_accepted))

    def started(self, request: Request, now: float) -> None:
        request.started_at = now
        self._queue_s.append(now - request.arrived_at)

    def token(self, sample: Sample, now: float) -> None:
        self._num_generated += 1
        if tenant := sample.sequence.tenant:
            self._tenant_outputs[tenant] += 1
        if sample.last_token_at is not None:
            if sample.last_token_at != now:  # several tokens from one step count as one gap
                self._inter_token_s.append(now - sample.last_token_at)
        elif sample.request.first_token_at is None:
            sample.request.first_token_at = now
            self._ttft_s.append(now - sample.request.arrived_at)
        sample.last_token_at = now

    def ended(self, request: Request, reason: FinishReason, now: float) -> None:
        begun = now if request.started_at is None else request.started_at
        first = request.first_token_at
        self._ended.append(
            RequestRecord(
                request_id=request.request_id,
                finish_reason=reason,
                invalid=request.invalid,
                prompt_tokens=request.num_prompt,
                cached_tokens=request.num_cached,
                generated_tokens=request.num_generated,
                queue_s=begun - request.arrived_at,
                ttft_s=None if first is None else first - request.arrived_at,
                total_s=now - request.arrived_at,
            )
        )

    def publish(self, step: SchedulerOutput | None, seconds: float, gauges: Gauges, num_evicted: int) -> None:
        if self._observer is not None and (step is not None or self._ended):
            record = self._record(step, seconds, gauges, num_evicted - self._num_evicted)
            try:
                self._observer.step(record)
            except Exception:  # an observer must never stop the engine
                logger.exception("the observer failed; its statistics are incomplete")
        self._num_evicted = num_evicted
        self._forget()

    def _record(
        self, step: SchedulerOutput | None, seconds: float, gauges: Gauges, evicted: int
    ) -> StepRecord:
        work = () if step is None else step.work
        lookups = () if step is None else step.lookups
        misses: Counter[str] = Counter()
        for lookup in lookups:
            misses.update(lookup.misses)
        encoded_s, self._encoded_s = tuple(self._encoded_s), []
        image_hits, self._num_image_hits = self._num_image_hits, 0
        decoding = sum(
            item.start >= item.sequence.num_prompt and item.stop - item.start == 1 for item in work
        )
        return StepRecord(
            seconds=seconds,
            prefill_tokens=sum(item.stop - item.start for item in work) - decoding,
            decode_tokens=decoding,
            generated_tokens=self._num_generated,
            preemptions=0 if step is None else len(step.preempted),
            evicted_pages=evicted,
            query_tokens=sum(lookup.num_tokens for lookup in lookups),
            hit_tokens=sum(lookup.num_hit for lookup in lookups),
            gauges=gauges,
            miss_tokens=misses,
            ttft_s=tuple(self._ttft_s),
            inter_token_s=tuple(self._inter_token_s),
            queue_s=tuple(self._queue_s),
            ended=tuple(self._ended),
            drafts=tuple(self._drafted),
            tenant_tokens=self._tenant_tokens(work),
            predicted_s=None if step is None else step.predicted_s,
            encoded_s=encoded_s,
            image_hits=image_hits,
        )

    def _tenant_tokens(self, work: Iterable[ScheduledChunk]) -> dict[str, TenantTokens]:
        prompts: Counter[str] = Counter()
        for sequence, start, stop, *_ in work:
            if start < sequence.num_prompt and sequence.tenant:
                prompts[sequence.tenant] += min(stop, sequence.num_prompt) - start
        outputs = self._tenant_outputs
        return {each: TenantTokens(prompts[each], outputs[each]) for each in {**prompts, **outputs}}
