from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.scheduler import Scheduler, SchedulerOutput

from ..api.outputs import FinishReason
from ..speculation.draft_tables import Average, BatchDrafter, DraftRequest, DraftState
from ..speculation.draft_times import DraftTimes, draft_rows
from ..speculation.drafter import ModelDrafter
from ..speculation.drafting import Speculation
from .request import Request, Sample
from .step_parts import PartResults, PartRows, StepPart


class DraftPart(StepPart):
    """Gives samples the drafts that their next step verifies."""

    def __init__(
        self,
        speculation: Speculation,
        model: BatchDrafter | None,
        scheduler: Scheduler,
        clock: Callable[[], float],
    ) -> None:
        self.speculation = speculation
        self.model = model
        self.draft_states: dict[Sample, DraftState] = {}
        self._scheduler = scheduler
        self._clock = clock
        self._times: DraftTimes | None = None
        self._drafting_s = 0.0
        self._step_s = Average()
        self._drafting: set[Sample] = set()
        self._to_notify: list[Sample] = []

    @property
    def is_live(self) -> bool:
        return bool(self._drafting or self._to_notify)

    def begin(self, request: Request) -> None:
        first = request.samples[0].sequence
        made = self.speculation.begin(
            request.params.speculate,
            [sample.state.constraint for sample in request.samples],
            num_prompt=request.num_prompt,
            owner=(first.tenant, first.salt),
        )
        for sample, drafting in zip(request.samples, made, strict=True):
            sample.drafting = drafting
            if drafting is not None:
                self._drafting.add(sample)
                if drafting.by_model is not None:
                    assert self.model is not None
                    self.draft_states[sample] = self.model.begin(sample.sequence)

    def rows(self, step: SchedulerOutput) -> PartRows | None:
        hidden = None if self.model is None else self.model.rows_of(step)
        return None if hidden is None else PartRows(hidden=hidden)

    def deliver(self, results: PartResults) -> None:
        assert self.model is not None
        assert results.hidden is not None
        self.model.record(results.hidden)

    def may_overlap(self, unfinished: Sequence[Sample]) -> bool:
        return not any(
            sample.drafting is not None and (sample.drafts or sample.drafting.by_model is not None)
            for sample in unfinished
        )

    def prepare(self, unfinished: Sequence[Sample]) -> None:
        for ended in self._to_notify:
            if ended.drafting is not None:
                ended.drafting.finished(ended.sequence.tokens)
        self._to_notify.clear()
        if drafting := [sample for sample in unfinished if sample.drafting is not None]:
            times = self._times = self._times or DraftTimes()
            if self.model is not None:
                began = self._clock()
                self._draft_by_model(self.model, unfinished, times.cost(len(unfinished)))
                self._drafting_s = self._clock() - began
            self.speculation.allocate(drafting, len(unfinished), times.ratios(len(unfinished)))
        self._scheduler.drafts = {each.sequence: each.drafts for each in self._drafting if each.drafts}

    def _draft_by_model(self, model: BatchDrafter, unfinished: Sequence[Sample], cost: float) -> None:
        if step_s := self._step_s.value:
            cost += model.round_s.value / step_s / len(unfinished)
        requests: list[DraftRequest] = []
        drafters: list[ModelDrafter] = []
        for sample in unfinished:
            if sample.drafting is not None and (drafter := sample.drafting.by_model) is not None:
                tokens, others = sample.sequence.tokens, len(unfinished) - 1
                count = sample.drafting.num_model_drafts(tokens, sample.tokens_left, cost=cost, others=others)
                requests.append(DraftRequest(self.draft_states[sample], tokens, sample.state, count))
                drafters.append(drafter)
        for drafter, drafts in zip(drafters, model.draft(requests), strict=True):
            drafter.drafts = drafts

    def end(self, sample: Sample) -> None:
        if self.model is not None and (draft_state := self.draft_states.pop(sample, None)) is not None:
            self.model.close(draft_state)
        if sample in self._drafting:
            self._drafting.discard(sample)
            self._scheduler.drafts.pop(sample.sequence, None)
            if sample.finish_reason is not FinishReason.ERROR:
                self._to_notify.append(sample)

    def observe(self, step: SchedulerOutput, seconds: float) -> None:
        if self.model is not None:
            seconds, self._drafting_s = seconds - self._drafting_s, 0.0
            self._step_s.add(seconds)
        self._scheduler.observe(step, seconds)
        if self._times is not None and (rows := draft_rows(step)) is not None:
            self._times.observe(*rows, seconds)

    def close(self) -> None:
        if self.model is not None:
            self.model.shut_down()
