from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.block_manager import BlockManager, RecurrentState
from octavo.scheduler import Limits, SampleResult, Scheduler, SchedulerOutput, Sequence
from steps import plan

PROMPT = 5

RESULTS = st.builds(
    SampleResult,
    st.none() | st.integers(0, 3),
    finished=st.booleans(),
    accepted=st.just(()),
    discarded=st.sampled_from((False, False, False, True)),
)


def serve(states: RecurrentState | None, steps: list[list[SampleResult]], *, by_rows: bool) -> list[object]:
    blocks = BlockManager(24, 2, states=states)
    scheduler = Scheduler(blocks, Limits(32, 3))
    sequences = [Sequence(str(number), [number] * (PROMPT + number), 6) for number in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    seen: list[object] = []
    for number, results in enumerate([[SampleResult(1)] * 3, *steps]):
        if (step := scheduler.plan()) is None:
            break
        assert step.decode_only == (number > 0)
        if number == 2:
            scheduler.abort(sequences[1])
        if by_rows:
            step = scheduler._planned[0] = step._replace(decode_only=False)
        scheduler.commit(step, results[: len(step.work)])
        blocks.check()
        seen.append([(each.status, list(each.tokens), each.num_written) for each in sequences])
        seen.append((blocks.idle_pages(), [blocks.counts.idle_cached, blocks.counts.idle_empty]))
    return seen


@pytest.mark.parametrize("states", [None, RecurrentState(num_slots=12, slot_bytes=1)])
@given(steps=st.lists(st.lists(RESULTS, min_size=3, max_size=3), max_size=8))
def test_columns_and_rows_are_committed_alike(
    states: RecurrentState | None, steps: list[list[SampleResult]]
) -> None:
    assert serve(states, steps, by_rows=False) == serve(states, steps, by_rows=True)


def plain_step(sequence: Sequence, drafts: tuple[int, ...] = ()) -> SchedulerOutput:
    scheduler = Scheduler(BlockManager(24, 2), Limits(32, 3))
    scheduler.add(sequence)
    step = plan(scheduler)
    assert not step.decode_only
    scheduler.commit(step, [SampleResult(1)] * (1 + len(sequence.parallel_samples)))
    scheduler.drafts = {sequence: drafts} if drafts else {}
    return plan(scheduler)


def test_drafts_make_a_step_less_plain() -> None:
    sequence = Sequence("one", [1] * PROMPT, 6)
    assert plain_step(sequence).decode_only
    sequence = Sequence("one", [1] * PROMPT, 6)
    step = plain_step(sequence, (1,))
    assert step.work[0].drafts == (1,)
    assert not step.decode_only


def test_a_last_prompt_token_is_not_plain() -> None:
    scheduler = Scheduler(BlockManager(24, 2), Limits(4, 3))
    scheduler.add(Sequence("one", [1] * PROMPT, 3))
    seen = []
    for results in ([], [SampleResult(1)], [SampleResult(1)]):
        step = plan(scheduler)
        seen += [(item.start, item.stop, step.decode_only) for item in step.work]
        scheduler.commit(step, results)
    assert seen == [(0, 4, False), (4, 5, False), (5, 6, True)]


def test_a_last_prompt_token_with_parallel_samples_is_not_plain() -> None:
    blocks = BlockManager(24, 2)
    scheduler = Scheduler(blocks, Limits(4, 3))
    sequence = Sequence("one", [1] * PROMPT, 2, parallel_samples=[Sequence("other", [1] * PROMPT, 2)])
    scheduler.add(sequence)
    step = plan(scheduler)
    scheduler.commit(step, [])
    step = plan(scheduler)
    assert [(item.start, item.stop, len(item.parallel_samples)) for item in step.work] == [(4, 5, 1)]
    assert not step.decode_only
    scheduler.commit(step, [SampleResult(1), SampleResult(2)])
    assert len(scheduler._queues.running) == 2


def test_as_many_results_as_rows() -> None:
    scheduler = Scheduler(BlockManager(24, 2), Limits(32, 3))
    scheduler.add(Sequence("one", [1] * PROMPT, 6))
    step = plan(scheduler)
    scheduler.commit(step, [SampleResult(1)])
    step = plan(scheduler)
    with pytest.raises(AssertionError, match="2 results for 1 samples"):
        scheduler.commit(step, [SampleResult(1)] * 2)
