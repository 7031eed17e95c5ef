"""Every request ends within the bounds of docs/design/preemption-bounds.md."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.block_manager import BlockManager, Digest
from octavo.scheduler import KVConnector, Limits, SampleResult, Scheduler, Sequence, Status
from waiting_queues import QUEUES

pytestmark = pytest.mark.property

PAGE_SIZE = 4


@dataclass(frozen=True)
class Crowd:
    # Prompt tokens, output tokens, samples, whether the prompt is shared.
    jobs: tuple[tuple[int, int, int, bool], ...]
    spare_pages: int
    max_running: int
    budget: int
    arrivals: int  # per step
    prefix_cache: bool
    target_itl: float | None  # seconds; a step takes 10 ms plus 1 ms per position
    store: bool
    in_vain: bool

    @property
    def num_pages(self) -> int:
        return self.spare_pages + max(pages(prompt + outputs) for prompt, outputs, _, _ in self.jobs)

    @property
    def most_preemptions(self) -> int:
        """Return K of docs/design/preemption-bounds.md."""
        growth = max(samples * pages(prompt + outputs) for prompt, outputs, samples, _ in self.jobs)
        return growth.bit_length()  # the least K with 2^K - 1 >= growth


def pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


jobs = st.tuples(st.integers(1, 30), st.integers(1, 40), st.sampled_from([1, 1, 1, 3]), st.booleans())
crowds = st.builds(
    Crowd,
    jobs=st.lists(jobs, min_size=2, max_size=8).map(tuple),
    spare_pages=st.integers(0, 12),
    max_running=st.integers(1, 6),
    budget=st.integers(6, 40),
    arrivals=st.integers(1, 3),
    prefix_cache=st.booleans(),
    target_itl=st.sampled_from([None, None, 0.001, 0.018]),
    store=st.booleans(),
    in_vain=st.booleans(),
)


class Store(KVConnector):
    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._kept: set[Digest] = set()
        self._waiting: dict[Sequence, int] = {}
        self._steps = 0

    @property
    def has_updates(self) -> bool:
        return bool(self._waiting)

    def offload(self, sequence: Sequence, token_s: float | None) -> None:  # noqa: ARG002
        self._kept.update(sequence.digests[: sequence.num_written // PAGE_SIZE])

    def start_load(self, sequence: Sequence, /, *, token_s: float | None = None) -> bool:  # noqa: ARG002
        found = self._blocks.num_findable(sequence.digests)
        if sequence.history.num_preempted == 0 or not self._kept.intersection(
            sequence.digests[found : found + 1]
        ):
            return False
        self._steps = (self._steps + 1) % 5
        self._waiting[sequence] = self._steps
        return True

    def poll(self) -> list[Sequence]:
        ready = [sequence for sequence, steps in self._waiting.items() if not steps]
        self._waiting = {each: steps - 1 for each, steps in self._waiting.items() if steps}
        for sequence in ready:
            first = stop = self._blocks.num_findable(sequence.digests)
            while stop < len(sequence.digests) and sequence.digests[stop] in self._kept:
                stop += 1
            if stop > first:
                named = sequence.digests[:stop]
                self._blocks.insert(sequence.tokens, named, first, lambda *_: None, salt=sequence.salt)
        return ready

    def cancel_load(self, sequence: Sequence) -> None:
        del self._waiting[sequence]


def sequences(crowd: Crowd, number: int) -> list[Sequence]:
    length, outputs, samples, shared = crowd.jobs[number % len(crowd.jobs)]
    prompt = [5 if shared else number] * length
    members = [
        Sequence(f"{number}.{i}", list(prompt), outputs, tenant=str(number % 3)) for i in range(samples)
    ]
    members[0].parallel_samples = members[1:]
    return members


def begin(crowd: Crowd, kind: str) -> Scheduler:
    blocks = BlockManager(crowd.num_pages, PAGE_SIZE, prefix_cache=crowd.prefix_cache)
    limits = Limits(crowd.budget, crowd.max_running, target_itl=crowd.target_itl)
    store = Store(blocks) if crowd.store and crowd.prefix_cache else None
    return Scheduler(blocks, limits, store, waiting=QUEUES[kind](blocks))


def advance(scheduler: Scheduler, *, in_vain: bool = False) -> int:
    step = scheduler.plan()
    if step is None:
        assert scheduler._queues.loading, "nobody gets on"
        return 0
    scheduler.blocks.check()
    ahead = scheduler.plan_ahead() if in_vain else None
    scheduler.commit(step, [SampleResult(7) for _ in step.sampled()])
    scheduler.observe(step, 0.01 + 0.001 * step.num_tokens)
    if ahead is None:
        return 1
    scheduler.commit(ahead, [SampleResult(7, discarded=True) for _ in ahead.sampled()])
    return 2


@pytest.mark.parametrize("kind", QUEUES)
@settings(max_examples=60)
@given(crowd=crowds)
def test_preemptions_per_sequence_are_bounded(kind: str, crowd: Crowd) -> None:
    scheduler = begin(crowd, kind)
    everyone: list[list[Sequence]] = []
    tokens = 0
    steps = 0
    for _ in range(100_000):
        while len(everyone) < len(crowd.jobs) and len(everyone) <= steps * crowd.arrivals:
            everyone.append(sequences(crowd, len(everyone)))
            tokens += sum(member.max_length for member in everyone[-1])
            scheduler.add(everyone[-1][0])
        if len(everyone) == len(crowd.jobs) and not scheduler.has_work:
            break
        steps += advance(scheduler, in_vain=crowd.in_vain)
    members = [member for samples in everyone for member in samples]
    assert all(member.status is Status.FINISHED for member in members)
    assert max(member.history.num_preempted for member in members) <= crowd.most_preemptions
    assert steps <= (2 if crowd.in_vain else 1) * (1 + crowd.most_preemptions) * tokens
