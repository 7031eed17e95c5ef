"""Serving of a workload with the real scheduler and block manager, and a ledger model.

Invariants are checked after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ledger import END, VOCABULARY, Ledger, next_token, served_alone, slot_of
from octavo.block_manager import BlockManager
from octavo.scheduler import (
    Limits,
    Lookup,
    SampleResult,
    ScheduledChunk,
    Scheduler,
    SchedulerOutput,
    Sequence,
    Status,
)
from octavo.scheduler.waiting import WaitingQueue
from strategies import Event, Workload

MAX_STEPS = 3000


@dataclass(eq=False)
class Served:
    """A workload that is served; ``harmed`` samples were aborted or failed.

    make_queue: order of admission (None: first come, first served, which is checked)
    overlaps:   plan each step before the previous one is committed, if possible."""

    workload: Workload
    make_queue: Callable[[BlockManager], WaitingQueue] | None = None
    overlaps: bool = False
    sequences: list[list[Sequence]] = field(default_factory=list)
    harmed: set[Sequence] = field(default_factory=set)
    lookups: list[Lookup] = field(default_factory=list)
    num_steps: int = 0
    num_ahead: int = 0
    num_dropped: int = 0  # rows of sequences that had ended
    num_rejected: int = 0  # drafts
    num_accepted: int = 0

    def __post_init__(self) -> None:
        load = self.workload
        self.blocks = BlockManager(
            load.groups,
            load.page_size,
            prefix_cache=load.prefix_cache,
            max_chunk=load.max_step_tokens,
            states=load.states,
        )
        self.scheduler = Scheduler(
            self.blocks,
            Limits(load.max_step_tokens, load.max_running),
            waiting=self.make_queue(self.blocks) if self.make_queue is not None else None,
        )
        self.ledger = Ledger(load.page_size, load.groups)
        self._planned_ahead: AheadStep | None = None

    @property
    def everyone(self) -> list[Sequence]:
        return [sequence for samples in self.sequences for sequence in samples]

    def run(self) -> Served:
        while self._step() or len(self.sequences) < len(self.workload.requests):
            assert self.num_steps < MAX_STEPS, "no end in sight"
        self.blocks.check()
        assert self.blocks.counts.held == 0, "pages leaked"
        slots = () if self.workload.states is None else (self.workload.states.num_slots,)
        assert self.blocks.idle_pages() == (*(group.num_pages for group in self.workload.groups), *slots)
        assert all(sequence.status is Status.FINISHED for sequence in self.everyone)
        return self

    def _step(self) -> bool:
        self.num_steps += 1
        self._arrive()
        self._happen("abort")
        if self._planned_ahead is not None:
            self._commit_ahead(self._planned_ahead)
            return True
        self._happen("rollback")
        before = self._running()
        backlogs = {sequence: sequence.backlog for sequence in before}
        step = self.scheduler.plan()
        self.blocks.check()
        check_shares(self.scheduler)
        if step is None:
            assert all(sequence.status is Status.FINISHED for sequence in self.everyone)
            return False
        self.lookups += step.lookups
        check_step(step, before, backlogs, self.scheduler)
        if self.make_queue is None:
            check_order(step, before, backlogs)
        self._planned_ahead = self._plan_ahead()
        results = self._compute(step)
        self._happen("abort_in_flight")
        self.scheduler.commit(step, results)
        self.blocks.check()
        for item, result in zip([item for item in step.work if item.drafts], self._drafted, strict=True):
            self._check_rejected(item, result)
        self._draft()
        return True

    def _plan_ahead(self) -> AheadStep | None:
        if not self.overlaps or (step := self.scheduler.plan_ahead()) is None:
            return None
        self.num_ahead += 1
        self.blocks.check()
        before = {item.sequence: item for item in self.scheduler._planned[0].work}
        assert step.sources is not None
        assert (step.copies, step.preempted, step.lookups) == ((), (), ())
        assert 0 < step.num_tokens <= self.workload.max_step_tokens
        for item, source in zip(step.work, step.sources, strict=True):
            sequence, table = item.sequence, item.sequence.table
            assert table is not None
            assert sequence.status is Status.RUNNING
            assert (item.start, item.stop, item.samples) == (before[sequence].stop, item.start + 1, True)
            assert item.stop <= table.capacity
            assert item.start + 1 < sequence.max_length, "it ends with the step before"
            assert self.scheduler._planned[0].sampled()[source] is sequence
        return AheadStep(step, [self._slots(item) for item in step.work])

    def _slots(self, item: ScheduledChunk) -> list[tuple[int, int]]:
        assert item.sequence.table is not None
        return [
            (group, slot_of(item.sequence.table, item.start, group))
            for group in range(len(self.workload.groups))
        ]

    def _commit_ahead(self, ahead: AheadStep) -> None:
        step = ahead.step
        lost = [item for item in step.work if item.sequence.table is None]
        discarded = [
            item.sequence
            for item in step.work
            if item not in lost and next_token([self.num_steps], item.sequence.sequence_id) == 0
        ]
        self._planned_ahead = None if discarded else self._plan_ahead()
        for item, slots in zip(step.work, ahead.slots, strict=True):
            if item in lost or item.sequence in discarded:
                self.ledger.spoil(slots)
        self.num_dropped += len(lost)
        kept = [item for item in step.work if item not in lost and item.sequence not in discarded]
        drawn = dict(
            zip([item.sequence for item in kept], self._compute(step._replace(work=tuple(kept))), strict=True)
        )
        self._happen("abort_in_flight")
        results = [drawn.get(item.sequence, SampleResult(None, discarded=True)) for item in step.work]
        self.scheduler.commit(step, results)
        self.blocks.check()
        self._draft()

    def _draft(self) -> None:
        drafts = {sequence: guesses(sequence, self.workload.drafts) for sequence in self._running()}
        self.scheduler.drafts = {sequence: some for sequence, some in drafts.items() if some}

    def _check_rejected(self, item: ScheduledChunk, result: SampleResult) -> None:
        self.num_accepted += len(result.accepted)
        self.num_rejected += len(item.drafts) - len(result.accepted)
        table = item.sequence.table
        if table is None or len(result.accepted) == len(item.drafts):
            return
        assert table.num_written == item.stop + len(result.accepted)
        for part in table.parts:
            assert len(part.pages) == -(-table.num_written // self.workload.page_size)

    def _running(self) -> list[Sequence]:
        return list(self.scheduler._queues.running)

    def _arrive(self) -> None:
        first = len(self.sequences)
        for request in self.workload.requests[first : first + self.workload.arrivals_per_step]:
            number = len(self.sequences)
            samples = [
                Sequence(
                    f"{number}.{sample}",
                    list(request.prompt),
                    max_tokens,
                    request.salt,
                    tenant=f"tenant {number % 3}",
                )
                for sample, max_tokens in enumerate(request.max_tokens)
            ]
            samples[0].parallel_samples = samples[1:]
            self.sequences.append(samples)
            self.scheduler.add(samples[0])

    def _now(self, kind: str) -> list[tuple[Event, Sequence]]:
        return [
            (event, self.sequences[event.request][event.sample])
            for event in self.workload.events
            if event.kind == kind
            and event.step == self.num_steps
            and event.request < len(self.sequences)
            and event.sample < len(self.sequences[event.request])
        ]

    def _happen(self, kind: str) -> None:
        for event, sequence in self._now(kind):
            if sequence.status is Status.FINISHED:
                continue
            if kind != "rollback":
                self.scheduler.abort(sequence)
                self.harmed.add(sequence)
                assert sequence.table is None
            elif sequence.table is not None and not self.blocks.has_copies:
                self._roll_back(sequence, event.amount)
            self.blocks.check()

    def _roll_back(self, sequence: Sequence, amount: int) -> None:
        table = sequence.table
        assert table is not None
        self.blocks.rollback(table, max(table.num_written - amount, 0))
        copies = self.blocks.take_copies()
        self.ledger.copy(copies)
        self.blocks.copied(copies)
        self.ledger.check(table, sequence.tokens, table.num_written, salt=sequence.salt)
        if table.state is not None and table.num_written:
            self.ledger.check_state(table, sequence.tokens, table.num_written, sequence.salt)

    def _compute(self, step: SchedulerOutput) -> list[SampleResult]:
        failing = {sequence for _, sequence in self._now("fail")} & set(step.sampled())
        self.harmed |= failing
        broken = frozenset(w.sequence for w in step.work if failing & {w.sequence, *w.parallel_samples})
        self.ledger.run(step, self.everyone, broken)
        results = []
        self._drafted: list[SampleResult] = []
        for sequence, drafts in step.sampled_with_drafts():
            results.append(SampleResult(None) if sequence in failing else judge(sequence, drafts))
            if drafts:
                self._drafted.append(results[-1])
        return results


@dataclass(frozen=True)
class AheadStep:
    step: SchedulerOutput
    slots: list[list[tuple[int, int]]]


def judge(sequence: Sequence, drafts: tuple[int, ...]) -> SampleResult:
    """Return the next token, and one more after each accepted draft."""
    tokens: list[int] = []
    for draft in (*drafts, None):
        tokens.append(next_token([*sequence.tokens, *tokens], sequence.sequence_id))
        if tokens[-1] != draft or tokens[-1] == END:
            break
    return SampleResult(tokens[0], tokens[-1] == END, tuple(tokens[1:]))


def guesses(sequence: Sequence, most: int) -> tuple[int, ...]:
    """Return the next tokens, sometimes with a mistake."""
    drafts: list[int] = []
    for _ in range(most):
        token = next_token([*sequence.tokens, *drafts], sequence.sequence_id)
        is_wrong = next_token([*sequence.tokens, *drafts], "mistakes") == 0
        drafts.append((token + 1) % VOCABULARY if is_wrong else token)
    return tuple(drafts)


def check_step(
    step: SchedulerOutput, before: list[Sequence], backlogs: dict[Sequence, int], scheduler: Scheduler
) -> None:
    """Check the budget, fairness of decoding, progress and preemption."""
    limits = scheduler.limits
    planned = [item.sequence for item in step.work]
    assert 0 < step.num_tokens <= limits.max_step_tokens
    assert scheduler.num_running <= limits.max_running
    assert len(set(planned)) == len(planned), "a sequence is planned twice"
    age = {sequence: number for number, sequence in enumerate(before)}

    decodes = [sequence for sequence in planned if backlogs.get(sequence) == 1]
    assert planned[: len(decodes)] == decodes, "decodes come first"
    assert [age[s] for s in decodes] == sorted(age[s] for s in decodes), "oldest first"
    if step.decode_only:
        assert not step.lookups
        assert all(item[1:] == (item.start, item.start + 1, True, (), ()) for item in step.work)
        assert all(item.start >= item.sequence.num_prompt for item in step.work)
    for item in step.work:
        assert item.start == item.sequence.num_written < item.stop <= len(item.sequence.tokens)
        assert item.samples == (item.stop == len(item.sequence.tokens))
        assert item.sequence.table is not None
        assert item.end <= item.sequence.table.capacity
        assert item.drafts == scheduler.drafts.get(item.sequence, ())[: len(item.drafts)]
        if item.drafts:
            assert item.samples
            assert item.end < item.sequence.max_length

    assert not before or before[0] in planned or backlogs[before[0]] > 1, "the oldest must always get on"
    skipped = [s for s in before if s not in planned and s not in step.preempted]
    for sequence in skipped:
        if backlogs[sequence] == 1:
            assert step.preempted or 0 in scheduler.blocks.idle_pages(), "a decode waits beside idle pages"
    assert not before or before[0] not in step.preempted, "the oldest went"
    assert all(s.status is Status.WAITING and s.table is None for s in step.preempted)


def check_shares(scheduler: Scheduler) -> None:
    queues = scheduler._queues
    assert queues.shares.running == Counter(sequence.tenant for sequence in queues.running)
    assert queues.shares.waiting == Counter(sequence.tenant for sequence in queues.waiting)
    assert queues.shares._present == Counter(queues.shares.running) + Counter(queues.shares.waiting)


def check_order(step: SchedulerOutput, before: list[Sequence], backlogs: dict[Sequence, int]) -> None:
    age = {sequence: number for number, sequence in enumerate(before)}
    planned = [item.sequence for item in step.work]
    chunks = [sequence for sequence in planned if backlogs.get(sequence, 1) > 1]
    arrivals = [sequence for sequence in planned if sequence not in age]
    assert [s for s in planned if backlogs.get(s) != 1] == chunks + arrivals, "prompt chunks, then arrivals"
    assert not (step.preempted and arrivals), "an arrival took what a preempted sequence gave"
    if before and before[0] not in planned:  # only a rollback takes pages from an admitted prompt
        assert before[0].table is not None
        assert len(before[0].tokens) > before[0].table.capacity
    assert [age[s] for s in chunks] == sorted(age[s] for s in chunks), "oldest first"
    first = min((age[sequence] for sequence in planned if sequence in age), default=0)
    assert all(age[victim] > first for victim in step.preempted), "an older one gave way"


def check_outputs(served: Served) -> None:
    """Check that samples have the tokens that they get alone, or a prefix if aborted."""
    for request, samples in zip(served.workload.requests, served.sequences, strict=True):
        for sequence, max_tokens in zip(samples, request.max_tokens, strict=True):
            output = sequence.tokens[sequence.num_prompt :]
            expected = served_alone(list(request.prompt), max_tokens, sequence.sequence_id)
            if sequence in served.harmed:
                assert output == expected[: len(output)]
            else:
                assert output == expected
