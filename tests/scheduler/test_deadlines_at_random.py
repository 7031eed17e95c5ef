from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.block_manager import BlockManager
from octavo.scheduler import LatencyGoal, Limits, SampleResult, Scheduler, Sequence
from octavo.scheduler.waiting.line import MAX_OVERTAKEN
from waiting_queues import QUEUES

pytestmark = pytest.mark.property

jobs = st.tuples(
    st.integers(1, 12),  # prompt tokens
    st.integers(1, 3),  # output tokens
    st.sampled_from([None, 0.0, 0.5, 3.0, 100.0]),  # seconds until the first token's deadline
    st.booleans(),
)


@pytest.mark.parametrize("kind", QUEUES)
@settings(max_examples=20)
@given(
    jobs=st.lists(jobs, min_size=1, max_size=6),
    backlog=st.integers(1, 4),
    running=st.integers(1, 3),
    spare_pages=st.integers(0, 8),
)
def test_the_kth_oldest_waits_for_so_many_others_at_most(
    kind: str, jobs: list[tuple[int, int, float | None, bool]], backlog: int, running: int, spare_pages: int
) -> None:
    blocks = BlockManager(4 + spare_pages, 4)
    s = Scheduler(blocks, Limits(12, running), waiting=QUEUES[kind](blocks))
    now, number, num_let_in = 0.0, 0, 0
    waiting: dict[Sequence, tuple[int, int]] = {}
    for _ in range(200):
        while s.num_waiting <= backlog:
            length, outputs, within, shared = jobs[number % len(jobs)]
            prompt = [1 if shared else 100 + number] * length
            by = None if within is None else now + within
            sequence = Sequence(str(number), prompt, outputs, latency=LatencyGoal(first_token_by=by))
            waiting[sequence] = num_let_in, len(waiting)
            s.add(sequence)
            number += 1
        step = s.plan(now)
        assert step is not None
        s.commit(step, [SampleResult(7) for _ in step.sampled()])
        s.observe(step, 0.1 * step.num_tokens)
        now += 0.1 * step.num_tokens
        for lookup in step.lookups:
            del waiting[lookup.sequence]
        num_let_in += len(step.lookups)
        for before, older in waiting.values():
            assert num_let_in - before <= (MAX_OVERTAKEN + running) * (older + 1)
