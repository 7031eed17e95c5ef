from __future__ import annotations

import pytest

from octavo.block_manager import BlockManager, MediaSpan
from octavo.scheduler import (
    Limits,
    SampleResult,
    Scheduler,
    SchedulerOutput,
    Sequence,
    SequenceTooLong,
    Status,
)
from steps import advance, plan


def scheduler(num_pages: int = 16, budget: int = 8, running: int = 4) -> Scheduler:
    return Scheduler(BlockManager(num_pages, 4), Limits(budget, running))


def shape(step: SchedulerOutput) -> list[tuple[str, int, int, bool]]:
    return [(work.sequence.sequence_id, work.start, work.stop, work.samples) for work in step.work]


def test_a_prompt_is_computed_in_chunks_and_then_token_by_token() -> None:
    s = scheduler(budget=4)
    sequence = Sequence("a", [1] * 10, max_tokens=2)
    s.add(sequence)
    assert shape(advance(s)) == [("a", 0, 4, False)]
    assert shape(advance(s)) == [("a", 4, 8, False)]
    assert shape(advance(s)) == [("a", 8, 10, True)]
    assert sequence.tokens[10:] == [7]
    assert shape(advance(s)) == [("a", 10, 11, True)]
    assert sequence.status is Status.FINISHED
    assert s.plan() is None
    assert s.blocks.counts.held == 0


@pytest.mark.parametrize(
    ("span", "stops"),
    [
        (MediaSpan(0, 3, bytes(32)), [4, 8, 10]),
        (MediaSpan(2, 4, bytes(32)), [4, 8, 10]),
        (MediaSpan(2, 4, bytes(32), is_bidirectional=True), [2, 6, 10]),
        (MediaSpan(4, 4, bytes(32), is_bidirectional=True), [4, 8, 10]),
        (MediaSpan(5, 3, bytes(32), is_bidirectional=True), [4, 8, 10]),
        (MediaSpan(6, 3, bytes(32), is_bidirectional=True), [4, 6, 10]),
    ],
)
def test_chunks_do_not_cut_rows_that_attend_to_each_other(span: MediaSpan, stops: list[int]) -> None:
    s = scheduler(budget=4)
    s.add(Sequence("a", [1] * 10, max_tokens=1, media=(span,)))
    assert [advance(s).work[0].stop for _ in stops] == stops


def test_decodes_then_chunks_then_arrivals_share_one_budget() -> None:
    s = scheduler(budget=8)
    s.add(Sequence("decode", [1], max_tokens=8))
    advance(s)
    s.add(Sequence("chunk", [2] * 12, max_tokens=1))
    advance(s)
    s.add(Sequence("arrival", [3] * 9, max_tokens=1))
    step = advance(s)
    assert shape(step) == [("decode", 2, 3, True), ("chunk", 7, 12, True), ("arrival", 0, 2, False)]
    assert step.num_tokens == 8


def test_no_more_than_max_running() -> None:
    s = scheduler(running=2)
    for name in "abc":
        s.add(Sequence(name, [1], max_tokens=2))
    assert [name for name, *_ in shape(advance(s))] == ["a", "b"]
    assert (s.num_running, s.num_waiting) == (2, 1)
    advance(s)
    assert [name for name, *_ in shape(advance(s))] == ["c"]


def test_a_repeated_prompt_computes_its_last_token_only() -> None:
    s = scheduler(budget=16, running=1)
    for name in "ab":
        s.add(Sequence(name, list(range(1, 10)), max_tokens=1))
    first, second = advance(s), advance(s)
    assert shape(first) == [("a", 0, 9, True)]
    assert shape(second) == [("b", 8, 9, True)]
    assert first.lookups[0].misses == {"new": 8, "partial_page": 1}
    assert (second.lookups[0].num_hit, second.lookups[0].misses) == (8, {"partial_page": 1})
    assert second.work[0].sequence.history.num_cached == 8


def test_the_youngest_is_preempted_and_returns_first() -> None:
    s = scheduler(num_pages=4)
    old, young = Sequence("old", [1] * 4, max_tokens=9), Sequence("young", [2] * 4, max_tokens=9)
    s.add(old)
    s.add(young)
    advance(s)  # one page each
    advance(s)  # a second page for the next token
    for _ in range(3):
        advance(s)
    assert len(old.tokens) == len(young.tokens) == 9
    s.add(Sequence("later", [3], max_tokens=1))
    step = advance(s)  # both need a third page
    assert step.preempted == (young,)
    assert shape(step) == [("old", 8, 9, True)]
    assert (young.status, young.table, s.num_preemptions) == (Status.WAITING, None, 1)
    while old.status is Status.RUNNING:
        advance(s)
    assert shape(advance(s))[0] == ("young", 4, 9, True), "the head of it outlived the tail"
    assert young.history.num_cached == 0, "of the first admission"


def test_a_decode_without_a_page_waits_and_keeps_its_own() -> None:
    s = scheduler(num_pages=3)
    s.add(Sequence("old", [1] * 3, max_tokens=5))
    s.add(Sequence("young", [2] * 4, max_tokens=4))
    advance(s)
    advance(s)  # the young sequence takes the last page, the old one still has space
    assert shape(advance(s)) == [("old", 4, 5, True)]
    assert s.num_preemptions == 1


def test_no_sequence_is_admitted_while_others_are_preempted() -> None:
    s = scheduler(num_pages=4)
    for name in ("old", "young"):
        s.add(Sequence(name, [1], max_tokens=12))
    for _ in range(8):
        advance(s)
    assert s.blocks.num_idle == 0
    step = advance(s)
    assert [sequence.sequence_id for sequence in step.preempted] == ["young"]
    assert shape(step) == [("old", 8, 9, True)]
    for start in range(9, 12):
        assert shape(advance(s)) == [("old", start, start + 1, True)], "no room for both to grow"
    assert shape(advance(s)) == [("young", 8, 9, True)]


def test_sequences_already_in_the_step_are_not_preempted() -> None:
    s = scheduler(num_pages=5, budget=16)
    old, young = Sequence("old", [1] * 8, max_tokens=9), Sequence("young", [2] * 7, max_tokens=9)
    s.add(old)
    s.add(young)
    advance(s)
    advance(s)  # all pages are in use
    assert old.table is not None
    s.blocks.rollback(old.table, 7)
    s.blocks.copied(s.blocks.take_copies())
    step = advance(s)
    assert shape(step) == [("young", 8, 9, True)], "the decode took the page; the chunk waits for another"
    assert (old.status, step.preempted) == (Status.RUNNING, ())


def test_a_prompt_is_admitted_only_with_pages_for_all_tokens() -> None:
    s = scheduler(num_pages=4, budget=4)
    s.add(Sequence("a", [1] * 8, max_tokens=2))
    s.add(Sequence("b", [2] * 9, max_tokens=1))
    advance(s)
    advance(s)
    assert (s.num_running, s.num_waiting) == (1, 1), "a first chunk of b would fit, the whole would not"
    advance(s)
    assert shape(advance(s)) == [("b", 0, 4, False)]


def test_an_arrival_that_did_not_fit_is_not_looked_up_again_before_pages_are_free() -> None:
    s = scheduler(num_pages=4, budget=8)
    s.add(Sequence("a", [1] * 8, max_tokens=4))
    advance(s)
    s.add(Sequence("b", [2] * 9, max_tokens=1))
    opened: list[int] = []
    opens = s.blocks.open
    s.blocks.open = lambda *args, **named: opened.append(1) or opens(*args, **named)  # type: ignore
    for _ in range(3):
        advance(s)
    assert len(opened) == 1
    advance(s)
    assert len(opened) == 2


@pytest.mark.parametrize("in_flight", [False, True])
def test_abort_frees_pages_at_once(in_flight: bool) -> None:
    s = scheduler()
    gone, stays = Sequence("gone", [1] * 3, max_tokens=4), Sequence("stays", [2] * 3, max_tokens=4)
    s.add(gone)
    s.add(stays)
    advance(s)
    step = plan(s) if in_flight else None
    s.abort(gone)
    s.abort(gone)
    assert s.blocks.counts.held == 1
    if step is not None:
        s.commit(step, [SampleResult(8), SampleResult(9)])
        assert stays.tokens[-1] == 9
    assert gone.tokens == [1, 1, 1, 7]
    assert [name for name, *_ in shape(plan(s))] == ["stays"]


def test_a_sequence_that_never_fits_is_refused_with_numbers() -> None:
    s = scheduler(num_pages=2)
    s.add(Sequence("fits", [1] * 5, max_tokens=3))
    with pytest.raises(SequenceTooLong, match=r"big needs 9 .*5 of prompt.* 4 generated.* holds 8; .*memory"):
        s.add(Sequence("big", [1] * 5, max_tokens=4))
    parallel_sample = Sequence("parallel sample", [1] * 5, max_tokens=4)
    with pytest.raises(SequenceTooLong, match="parallel sample"):
        s.add(Sequence("parent", [1] * 5, max_tokens=1, parallel_samples=[parallel_sample]))
    assert s.num_waiting == 1


def test_limits_must_agree() -> None:
    with pytest.raises(ValueError, match="max_step_tokens must be at least max_running, got 4 and 5"):
        Limits(max_step_tokens=4, max_running=5)
    with pytest.raises(ValueError, match="max_running must be at least 1, got 0"):
        Limits(max_step_tokens=4, max_running=0)


def test_a_sequence_must_have_something_to_do() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        Sequence("a", [], max_tokens=1)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        Sequence("a", [1], max_tokens=0)
