from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.block_manager import BlockManager
from octavo.scheduler import Limits, SampleResult, Scheduler, SchedulerOutput, Sequence, Status
from steps import advance, plan


def scheduler(*, budget: int = 64, prefix_cache: bool = True) -> Scheduler:
    return Scheduler(BlockManager(64, 4, prefix_cache=prefix_cache), Limits(budget, 8))


def shape(step: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(work.sequence.sequence_id, work.start, work.stop) for work in step.work]


def test_the_second_waits_one_step_and_computes_only_its_tail() -> None:
    s = scheduler()
    for name in "abc":
        s.add(Sequence(name, [1] * 10, max_tokens=4))
    assert shape(advance(s)) == [("a", 0, 10)]
    assert shape(advance(s)) == [("a", 10, 11), ("b", 8, 10), ("c", 8, 10)]


@pytest.mark.parametrize("why", ["other salt", "cache off", "less than a page"])
def test_prompts_wait_only_for_pages_that_they_can_share(why: str) -> None:
    s = scheduler(prefix_cache=why != "cache off")
    length = 4 if why == "less than a page" else 10
    s.add(Sequence("a", [1] * length, max_tokens=4))
    s.add(Sequence("b", [1] * length, max_tokens=4, salt=b"x" if why == "other salt" else b""))
    assert shape(advance(s)) == [("a", 0, length), ("b", 0, length)]


def test_a_second_long_prompt_follows_the_first_by_chunks() -> None:
    s = scheduler(budget=16)
    s.add(Sequence("a", [1] * 42, max_tokens=4))
    s.add(Sequence("b", [1] * 42, max_tokens=4))
    steps = [shape(advance(s)) for _ in range(4)]
    assert steps[:3] == [[("a", 0, 16)], [("a", 16, 32)], [("a", 32, 42)]]
    assert steps[3] == [("a", 42, 43), ("b", 40, 42)]


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_when_the_first_one_is_lost_the_next_takes_over(how: str) -> None:
    s = scheduler()
    first, second = Sequence("a", [1] * 10, max_tokens=4), Sequence("b", [1] * 10, max_tokens=4)
    s.add(first)
    s.add(second)
    step = plan(s)
    if how == "abort":
        s.abort(first)
    s.commit(step, [SampleResult(None if how == "fail" else 7)])
    assert first.status is Status.FINISHED
    assert shape(advance(s)) == [("b", 0, 10)]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(8, 40))
def test_no_page_of_a_common_prompt_is_computed_twice(lengths: list[int], budget: int) -> None:
    s = scheduler(budget=budget)
    for number, length in enumerate(lengths):
        s.add(Sequence(str(number), list(range(length)), max_tokens=1))
    computed: list[int] = []
    while s.num_running + s.num_waiting:
        for _, start, stop in shape(advance(s)):
            computed += range(start, stop)
    for position in range(max(lengths)):
        page_end = (position // 4 + 1) * 4
        cannot_share = sum(position < length <= page_end for length in lengths)
        assert computed.count(position) <= 1 + cannot_share


def steps_beside(
    others: list[int], mine: list[int], *, budget: int, later: bool
) -> list[list[tuple[str, int, int]]]:
    s = scheduler(budget=budget)
    s.add(Sequence("others", list(others), max_tokens=2, salt=b"others"))
    while later and s.num_running + s.num_waiting:
        advance(s)
    s.add(Sequence("mine", list(mine), max_tokens=2, salt=b"mine"))
    steps = []
    while s.num_running + s.num_waiting:
        steps.append(shape(advance(s)))
    return steps


@given(st.lists(st.integers(0, 1), min_size=1, max_size=48), st.integers(8, 64), st.booleans())
def test_timing_reveals_nothing_about_other_tenants(mine: list[int], budget: int, later: bool) -> None:
    same = steps_beside(mine, mine, budget=budget, later=later)
    assert same == steps_beside([token + 2 for token in mine], mine, budget=budget, later=later)
