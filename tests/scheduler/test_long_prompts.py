from __future__ import annotations

from octavo.block_manager import BlockManager
from octavo.scheduler import Limits, Scheduler, SchedulerOutput, Sequence, Status
from steps import advance, names

BUDGET = 512


def scheduler(*, num_pages: int = 8192, budget: int = BUDGET, running: int = 64) -> Scheduler:
    return Scheduler(BlockManager(num_pages, 16), Limits(budget, running))


def shape(step: SchedulerOutput) -> list[tuple[str, int]]:
    return [(item.sequence.sequence_id, item.stop - item.start) for item in step.work]


def prompt(number: int, length: int) -> list[int]:
    return [number, *range(length - 1)]


def test_short_prompts_after_long_ones_start_within_a_few_steps() -> None:
    s = scheduler()
    longs = [Sequence(f"long {i}", prompt(i, 8000), max_tokens=4) for i in range(8)]
    shorts = [Sequence(f"short {i}", prompt(100 + i, 60), max_tokens=4) for i in range(8)]
    for sequence in (*longs, *shorts):
        s.add(sequence)
    for _ in range(4):
        assert advance(s).num_tokens == BUDGET
    assert all(len(short.tokens) > 60 for short in shorts), "each has its first token"
    assert longs[0].num_written > 4 * BUDGET - 8 * 64 - 40, "and what they left was not wasted"
    while not all(sequence.status is Status.FINISHED for sequence in longs):
        advance(s)


def test_endless_short_prompts_leave_half_to_long_prompts() -> None:
    s = scheduler()
    longs = [Sequence(f"long {i}", prompt(i, 4000), max_tokens=1) for i in range(3)]
    for sequence in longs:
        s.add(sequence)
    number, steps = 100, 0
    while not all(sequence.status is Status.FINISHED for sequence in longs):
        for _ in range(4):
            s.add(Sequence(f"short {number}", prompt(number, 200), max_tokens=1))
            number += 1
        written = sum(
            item.stop - item.start for item in advance(s).work if "long" in item.sequence.sequence_id
        )
        assert written >= BUDGET // 2 - 64 or longs[-1].status is Status.FINISHED
        steps += 1
        assert steps <= 3 * 4000 / (BUDGET / 2) + 3


def test_a_long_prompt_without_pages_is_not_overtaken() -> None:
    s = scheduler(num_pages=100)
    s.add(Sequence("short", prompt(1, 320), max_tokens=200))
    advance(s)
    s.add(Sequence("long", prompt(2, 1300), max_tokens=1))
    later = Sequence("later", prompt(3, 16), max_tokens=1)
    s.add(later)
    for _ in range(150):
        assert names(advance(s)) == ["short"]
    assert s.num_waiting == 2
    while later.status is not Status.FINISHED:
        assert names(advance(s)) in (["short"], ["long", "later"])


def test_a_cached_prefix_does_not_make_a_prompt_long() -> None:
    s = scheduler()
    s.add(Sequence("history", prompt(1, 4000), max_tokens=1))
    while s.has_work:
        advance(s)
    s.add(Sequence("long", prompt(2, 8000), max_tokens=1))
    s.add(Sequence("other", prompt(3, 8000), max_tokens=1))
    s.add(Sequence("chat", [*prompt(1, 4000), *range(50)], max_tokens=1))
    for _ in range(3):
        computed = names(advance(s))
    assert "chat" in computed
    assert "other" not in computed


def test_long_prompts_are_overtaken_only_within_a_priority() -> None:
    s = scheduler()
    s.add(Sequence("first", prompt(1, 4000), max_tokens=1))
    s.add(Sequence("urgent long", prompt(2, 4000), max_tokens=1, priority=-1))
    s.add(Sequence("urgent long too", prompt(3, 4000), max_tokens=1, priority=-1))
    s.add(Sequence("short", prompt(4, 20), max_tokens=1))
    s.add(Sequence("urgent short", prompt(5, 20), max_tokens=1, priority=-1))
    assert shape(advance(s)) == [("urgent long", 492), ("urgent short", 20)]
    assert shape(advance(s)) == [("urgent long", 512)]
