"""Pinned prefixes, which are never evicted and never make a sequence wait forever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.block_manager import BlockManager, PageId, PageTable, Pins
from octavo.block_manager.pins import PinLimit
from octavo.scheduler import Limits, SampleResult, Scheduler, Sequence, SequenceTooLong


def serve(blocks: BlockManager, tokens: list[int], salt: bytes = b"") -> int:
    table = blocks.open(tokens, salt=salt)
    found = table.num_written
    assert blocks.reserve(table, len(tokens))
    blocks.commit(table, tokens, len(tokens))
    blocks.close(table)
    return found


def test_more_than_may_be_pinned_is_refused_and_changes_nothing() -> None:
    blocks = BlockManager(8, 4, max_pinned=3)
    pins = Pins(blocks)
    serve(blocks, [1] * 8)
    serve(blocks, [1, 1, 1, 1, 2, 2, 2, 2])
    serve(blocks, [3] * 8)
    assert pins.pin("one", [1] * 8) == 8
    assert pins.pin("other", [1, 1, 1, 1, 2, 2, 2, 2]) == 8, "they share their first page"
    assert pins.pin("third", [3] * 8) is None
    assert (pins.num_pages, blocks.counts.held) == (3, 3)
    assert pins.pin("one", [3] * 4) == 4, "a name is pinned anew"
    assert (pins.num_pages, blocks.counts.held) == (3, 3)


def test_an_owners_pins_stay_within_its_limit_whatever_room_others_leave() -> None:
    blocks = BlockManager(12, 4, max_pinned=4)
    pins = Pins(blocks)
    serve(blocks, [1] * 8)
    serve(blocks, [1, 1, 1, 1, 2, 2, 2, 2])
    serve(blocks, [3] * 8)
    alice, bob = PinLimit("alice/", 3), PinLimit("bob/", 2)
    assert pins.pin("alice/1", [1] * 8, limit=alice) == 8
    assert pins.pin("alice/2", [1, 1, 1, 1, 2, 2, 2, 2], limit=alice) == 8, "one page is shared"
    assert pins.num_pages_of("alice/") == pins.num_pages == 3
    assert pins.pin("alice/3", [3] * 4, limit=alice) is None, "there is room, but not for alice"
    assert pins.pin("bob/3", [3] * 8, limit=bob) is None, "bob may, but there is no room"
    assert pins.pin("bob/3", [3] * 4, limit=bob) == 4
    assert pins.pin("alice/1", [3] * 4, limit=alice) == 4, "a name is pinned anew"
    assert (pins.num_pages_of("alice/"), pins.num_pages_of("bob/"), pins.num_pages) == (3, 1, 3)
    for name in ("alice/1", "alice/2", "bob/3"):
        assert pins.unpin(name)
    assert blocks.counts.held == pins.num_pages == 0
    blocks.check()


def test_pins_are_counted_without_reading_other_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BlockManager(64, 4, max_pinned=40)
    pins, read = Pins(blocks), list[PageTable]()
    held_by = blocks.held_by

    def recorded(table: PageTable) -> list[tuple[int, PageId]]:
        read.append(table)
        return held_by(table)

    monkeypatch.setattr(blocks, "held_by", recorded)
    for token in range(12):
        serve(blocks, [token] * 8)
        assert pins.pin(str(token), [token] * 8) == 8
    read.clear()
    assert pins.pin("0", [1] * 8) == 8, "the pin that is replaced is read, too"
    assert pins.unpin("3")
    assert (len(read), pins.num_pages, blocks.counts.held) == (3, 20, 20)


def test_requests_that_fit_only_without_pins_are_refused() -> None:
    scheduler = Scheduler(BlockManager(8, 4, max_pinned=3), Limits(64, 4))
    with pytest.raises(SequenceTooLong):
        scheduler.add(Sequence("a", [1] * 17, max_tokens=4))
    scheduler.add(Sequence("b", [1] * 16, max_tokens=4))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=8), st.integers(0, 3))
def test_all_requests_are_served_at_the_pin_limit(prompts: list[tuple[int, int]], max_pinned: int) -> None:
    blocks = BlockManager(4 + max_pinned, 4, max_pinned=max_pinned)
    pins = Pins(blocks)
    scheduler = Scheduler(blocks, Limits(16, 4))
    for number, (token, length) in enumerate(prompts):
        scheduler.add(Sequence(str(number), [token] * length, max_tokens=4))
    while (step := scheduler.plan()) is not None:
        scheduler.commit(step, [SampleResult(7) for _ in step.sampled()])
        pins.pin(str(step.num_tokens), step.work[0].sequence.tokens)
        blocks.check()
        assert pins.num_pages <= max_pinned
    assert blocks.counts.held == pins.num_pages
    for name in pins.kept():
        assert pins.unpin(name)
    assert blocks.counts.held == 0


@pytest.mark.parametrize("max_pinned", [-1, 8])
def test_a_pool_that_could_be_pinned_whole_is_refused(max_pinned: int) -> None:
    with pytest.raises(ValueError, match=f"got {max_pinned}"):
        BlockManager(8, 4, max_pinned=max_pinned)
