from __future__ import annotations

from octavo.block_manager import BlockManager, PageCopy, PageId
from octavo.scheduler import Limits, SampleResult, Scheduler, SchedulerOutput, Sequence, Status
from steps import plan


def group(size: int, num_prompt: int = 6, max_tokens: int = 4) -> list[Sequence]:
    members = [Sequence(f"s{i}", list(range(1, num_prompt + 1)), max_tokens) for i in range(size)]
    members[0].parallel_samples = members[1:]
    return members


def scheduler(num_pages: int = 16, running: int = 8) -> Scheduler:
    return Scheduler(BlockManager(num_pages, 4), Limits(16, running))


def commit(
    scheduler: Scheduler, step: SchedulerOutput, *tokens: int | None, ends: frozenset[int] = frozenset()
) -> None:
    scheduler.commit(step, [SampleResult(token, finished=token in ends) for token in tokens])
    scheduler.blocks.check()


def test_parallel_samples_share_full_pages_and_copy_the_partial_one() -> None:
    s = scheduler()
    a, b, c = group(3)
    s.add(a)
    step = plan(s)
    assert step.num_tokens == 6, "the prompt is computed once"
    assert step.sampled() == [a, b, c]
    commit(s, step, 10, 11, 12)
    assert [m.tokens[-1] for m in (a, b, c)] == [10, 11, 12]
    assert s.num_running == 3
    assert {m.table.pages[0] for m in (a, b, c) if m.table} == {0}
    following = plan(s)
    assert set(following.copies) == {PageCopy(PageId(1), PageId(m.table.pages[1])) for m in (b, c) if m.table}
    assert [work.start for work in following.work] == [6, 6, 6]
    assert all(m.history.num_cached == 0 for m in (a, b, c))


def test_parallel_samples_without_a_place_wait_with_their_first_token() -> None:
    s = scheduler(running=2)
    a, b, c = group(3)
    s.add(a)
    commit(s, plan(s), 10, 11, 12)
    assert (b.status, c.status) == (Status.RUNNING, Status.WAITING)
    assert c.tokens[-1] == 12
    for _ in range(3):
        step = plan(s)
        commit(s, step, *[20] * len(step.sampled()))
    step = plan(s)
    assert [(w.sequence, w.start, w.stop) for w in step.work] == [(c, 4, 7)], "full pages were found again"
    assert c.history.num_cached == 0
    assert not step.lookups, "the prompt was looked up once, for all"


def test_a_sample_replaces_a_parent_that_ends_at_its_first_token() -> None:
    s = scheduler()
    a, b, c = group(3)
    s.add(a)
    commit(s, plan(s), 10, 11, 12, ends=frozenset({10}))
    assert (a.status, a.table) == (Status.FINISHED, None)
    assert [w.sequence for w in plan(s).work] == [b, c]
    assert b.table is not None
    assert list(b.table.pages) == [0, 1], "no copy: nobody else writes there"


def test_an_aborted_parallel_sample_leaves_and_gets_no_token() -> None:
    s = scheduler()
    a, b, c = group(3)
    s.add(a)
    s.abort(b)
    step = plan(s)
    assert step.sampled() == [a, c]
    s.abort(c)
    assert step.sampled() == [a, c]
    commit(s, step, 10, 12)
    assert len(c.tokens) == 6
    assert [w.sequence for w in plan(s).work] == [a]


def test_a_parallel_sample_takes_the_place_of_an_aborted_parent() -> None:
    for in_flight in (False, True):
        s = scheduler()
        a, b, c = group(3)
        s.add(a)
        step = plan(s) if in_flight else None
        s.abort(a)
        if step is not None:
            commit(s, step, 10, 11, 12)
        else:
            step = plan(s)
            assert step.sampled() == [b, c]
            commit(s, step, 11, 12)
        assert [m.tokens[6:] for m in (a, b, c)] == [[], [11], [12]]
        assert [w.sequence for w in plan(s).work] == [b, c]


def test_a_parent_between_two_chunks_hands_its_pages_over() -> None:
    s = scheduler()
    a, b = group(2, num_prompt=20)
    s.add(a)
    commit(s, plan(s))
    s.abort(a)
    step = plan(s)
    assert [(w.sequence, w.start, w.stop) for w in step.work] == [(b, 16, 20)]


def test_the_source_of_a_copy_outlives_its_writer() -> None:
    s = scheduler(num_pages=4)
    a, b = group(2)
    s.add(a)
    commit(s, plan(s), 10, 11)
    s.abort(a)
    s.add(Sequence("newcomer", [9] * 4, max_tokens=1))
    step = plan(s)
    (copy,) = step.copies
    written = {page for w in step.work if w.sequence.table for page in w.sequence.table.pages}
    assert copy.source not in written - set(b.table.pages if b.table else [])
    commit(s, step, *[12] * len(step.sampled()))
    assert s.blocks.counts.held == 2


def test_pages_of_a_failed_row_are_not_shared() -> None:
    s = scheduler()
    a, b, c = group(3)
    s.add(a)
    commit(s, plan(s), 10, None, 12)
    assert [m.status for m in (a, b, c)] == [Status.WAITING, Status.FINISHED, Status.WAITING]
    assert (s.blocks.counts.held, s.blocks.counts.idle_cached) == (0, 0)
    step = plan(s)
    assert [(w.sequence, w.start, w.stop) for w in step.work] == [(a, 0, 7)], "c waits for a's page"
    s.commit(step, [SampleResult(13)])
    assert [(w.sequence, w.start, w.stop) for w in plan(s).work] == [(a, 7, 8), (c, 4, 7)]
