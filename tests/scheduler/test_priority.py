from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.block_manager import BlockManager
from octavo.scheduler import Limits, Scheduler, Sequence, Status
from steps import advance, names


def scheduler(num_pages: int = 16, running: int = 2) -> Scheduler:
    return Scheduler(BlockManager(num_pages, 4, prefix_cache=False), Limits(8, running))


def test_smaller_priorities_are_admitted_first_equals_in_order() -> None:
    s = scheduler(running=2)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0), ("e", -1)):
        s.add(Sequence(name, [1], max_tokens=1, priority=priority))
    assert names(advance(s)) == ["e", "b"]
    assert names(advance(s)) == ["d", "a"]
    assert names(advance(s)) == ["c"]


def test_the_largest_number_gives_its_pages_up_though_it_is_older() -> None:
    s = scheduler(num_pages=4)
    low = Sequence("low", [1] * 7, max_tokens=9, priority=5)
    high = Sequence("high", [2] * 7, max_tokens=9)
    s.add(low)
    advance(s)
    s.add(high)
    while low.status is Status.RUNNING:
        advance(s)
    assert (low.status, high.status) == (Status.WAITING, Status.RUNNING)
    while s.num_running or s.num_waiting:
        advance(s)
    assert (len(low.tokens), len(high.tokens)) == (16, 16)


def test_an_urgent_request_is_admitted_before_one_that_lacks_pages() -> None:
    s = scheduler(num_pages=6, running=3)
    s.add(Sequence("runs", [1] * 16, max_tokens=4))
    for _ in range(3):
        advance(s)  # it holds five pages
    s.add(Sequence("large", [2] * 12, max_tokens=1))
    assert names(advance(s)) == ["runs"]
    s.add(Sequence("small", [3], max_tokens=1, priority=-1))
    assert names(advance(s)) == ["runs", "small"]


@given(
    st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=12)
)
def test_all_are_served_and_queues_stay_in_order(jobs: list[tuple[int, int, int]]) -> None:
    s = scheduler(num_pages=8, running=3)
    sequences = [
        Sequence(str(number), [number] * length, max_tokens=tokens, priority=priority)
        for number, (priority, length, tokens) in enumerate(jobs)
    ]
    for number, sequence in enumerate(sequences):
        s.add(sequence)
        if number % 3 == 0:
            advance(s)
    while s.num_running or s.num_waiting:
        for queue in (s._queues.running, s._queues.waiting):
            assert [q.priority for q in queue] == sorted(q.priority for q in queue)
        advance(s)
    assert all(sequence.status is Status.FINISHED for sequence in sequences)
