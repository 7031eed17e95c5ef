from __future__ import annotations

from octavo.block_manager import BlockManager
from octavo.scheduler import Limits, Scheduler, Sequence, Status
from steps import advance

PAGE_SIZE = 4


def is_running(sequence: Sequence) -> bool:
    return sequence.status is Status.RUNNING


def until_preempted(scheduler: Scheduler) -> list[str]:
    for _ in range(1000):
        if step := advance(scheduler).preempted:
            return [sequence.sequence_id for sequence in step]
    raise AssertionError("the pool never ran short")


def test_the_sequence_that_loses_least_is_preempted() -> None:
    s = Scheduler(BlockManager(12, PAGE_SIZE), Limits(64, 8))
    for name, length in (("old", 4), ("short", 4), ("long", 18)):
        s.add(Sequence(name, [ord(name[0])] * length, 30))
    assert until_preempted(s) == ["short"], "though it is not the youngest"


def test_smaller_priorities_keep_their_pages_though_others_lose_more() -> None:
    s = Scheduler(BlockManager(12, PAGE_SIZE), Limits(64, 8))
    for name, length, priority in (("old", 4, 0), ("urgent", 5, 0), ("later", 18, 1)):
        s.add(Sequence(name, [ord(name[0])] * length, 30, priority=priority))
    assert until_preempted(s) == ["later"]


def test_a_preempted_sequence_waits_for_pages_to_grow() -> None:
    s = Scheduler(BlockManager(40, PAGE_SIZE, prefix_cache=False), Limits(64, 8))
    everyone = [Sequence(f"m{n}", [n] * 8, 12 * (n + 1)) for n in range(5)]
    everyone += [Sequence(f"l{n}", [9 + n] * 60, 20) for n in range(2)]
    for sequence in everyone:
        s.add(sequence)
    while s.has_work:
        advance(s)
    assert s.num_preemptions > 0
    assert max(sequence.history.num_preempted for sequence in everyone) <= 2


def test_an_early_end_lets_a_preempted_sequence_return() -> None:
    blocks = BlockManager(8, PAGE_SIZE)
    s = Scheduler(blocks, Limits(64, 8))
    old, equal = (Sequence(name, [1] * 9, 20) for name in ("old", "equal"))
    s.add(old)
    advance(s)
    s.add(equal)
    advance(s)
    waiting = Sequence("waits", [2] * 4, 8)
    waiting.history.num_preempted = 5
    s.add(waiting)
    advance(s)
    assert not is_running(waiting)
    s.abort(equal)
    s.abort(old)
    advance(s)
    assert is_running(waiting)
