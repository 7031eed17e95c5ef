from __future__ import annotations

import random

import pytest

from octavo.block_manager import BlockManager, Digest, PageId, RecurrentState
from octavo.block_manager import snapshot_order as module
from octavo.block_manager.snapshot_order import SHARED, SnapshotOrder


def digest(number: int) -> Digest:
    return Digest(number.to_bytes(4, "big"))


class Slots:
    def __init__(self, num_slots: int = 8, *, page_bytes: int = 1, snapshot_bytes: int = 1) -> None:
        self.order = SnapshotOrder(num_slots, page_bytes=page_bytes, snapshot_bytes=snapshot_bytes)
        self.digests: list[Digest | None] = [None] * num_slots

    def put(
        self, slot: int, name: int, num_pages: int = 1, *, turns: int = 0, is_branch: bool = False
    ) -> None:
        self.digests[slot] = digest(name)
        self.order.add(digest(name), num_pages, turns=turns, is_branch=is_branch)
        self.release(slot)

    def release(self, slot: int) -> None:
        self.order.release([PageId(slot)], self.digests)

    def evict(self) -> int:
        (slot,) = self.order.evict(1)
        name = self.digests[slot]
        assert name is not None
        self.digests[slot] = None
        self.order.record_eviction(name)
        return int.from_bytes(name, "big")

    def check(self) -> None:
        self.order.check([name for name in self.digests if name is not None])


def test_without_statistics_age_and_saved_bytes_decide_eviction() -> None:
    slots = Slots(snapshot_bytes=100)
    for slot, num_pages in enumerate((1, 1, 8, 1, 8)):
        slots.put(slot, slot, num_pages)
    slots.order.demote(PageId(4), max_hits=1)
    slots.check()
    assert [slots.evict() for _ in range(5)] == [4, 0, 1, 3, 2]
    slots.check()


def test_snapshots_with_more_hits_are_not_demoted() -> None:
    slots = Slots()
    for slot in range(2):
        slots.put(slot, slot)
    for _ in range(2):
        slots.order.record_hit(digest(1))
    slots.order.demote(PageId(1), max_hits=1)
    assert slots.evict() == 0
    slots.order.demote(PageId(0), max_hits=1)
    assert slots.evict() == 1


def test_evicted_snapshots_still_count_turns() -> None:
    slots = Slots()
    slots.put(0, 7, turns=2)
    names = [digest(5), digest(6), digest(7), digest(8)]
    assert slots.order.last_known(names) == 3
    assert slots.evict() == 7
    assert slots.order.last_known(names) == 3
    assert slots.order.last_known(names[:2]) == 0
    assert [slots.order.record_hit(digest(7)) for _ in range(SHARED + 1)] == [3] * SHARED + [0], (
        "shared by many"
    )
    slots.put(0, 7, is_branch=True)
    assert slots.order.num_hits(digest(7)) == SHARED + 1
    assert slots.order.record_hit(digest(7)) == 0, "what several prompts begin with is no turn"
    slots.evict()
    slots.order.forget(digest(7))
    assert slots.order.last_known(names) == 0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_REMEMBERED", 5)
    slots = Slots(1)
    for name in range(9):
        slots.put(0, name)
        slots.evict()
        slots.check()
    assert [slots.order.last_known([digest(name)]) for name in range(9)] == [0] * 4 + [1] * 5


@pytest.mark.parametrize("wants_pages", [False, True])
def test_the_price_of_pages_depends_on_the_shortage(wants_pages: bool) -> None:
    slots = Slots(2)
    slots.put(1, 99_999)
    for name in range(2000):
        slots.put(slots.digests.index(None), name)
        if wants_pages:
            slots.order.note_page_shortage()
            slots.order.note_page_shortage()
        slots.evict()
    assert (slots.order.price > 2) is wants_pages
    assert (slots.order.price < 0.5) is not wants_pages
    slots.evict()
    before = slots.order.price
    for name in range(200):
        slots.put(0, name)
        slots.evict()
    assert slots.order.price == pytest.approx(before, rel=0.01)


@pytest.mark.parametrize("price", [0.125, 8.0])
def test_if_pages_are_short_old_long_prefixes_are_evicted_first(price: float) -> None:
    slots = Slots(4, page_bytes=10, snapshot_bytes=100)
    slots.order.price = price
    slots.put(0, 10_000, 8)
    for name in range(30):
        slots.put(2, name)
        slots.order.reuse([PageId(2)])
        slots.order.record_eviction(digest(name))
        slots.order.forget(digest(name))
    slots.put(1, 10_001, 1)
    assert slots.evict() == (10_000 if price > 1 else 10_001)


def test_conversations_that_return_are_kept_from_the_second_time_on() -> None:
    states = RecurrentState(num_slots=9, slot_bytes=1)
    blocks = BlockManager(4000, 1, states=states)
    random_ = random.Random(1)
    going: list[tuple[int, list[int]]] = []
    fresh, found, wanted = 1000, 0, 0
    for now in range(3000):
        if going and going[0][0] <= now:
            _, tokens = going.pop(0)
        else:
            tokens = []
        begun = len(tokens)
        tokens = [*tokens, *range(fresh, fresh + 3)]
        fresh += 3
        table = blocks.open([*tokens, 0])
        assert blocks.reserve(table, len(tokens))
        if now > 1000 and begun > 6:
            wanted += 1
            found += table.num_written == begun
        blocks.copied(blocks.take_copies())
        blocks.plan_snapshots(table, table.num_written, len(tokens), num_known=len(tokens))
        blocks.commit(table, tokens, len(tokens))
        blocks.close(table)
        if len(tokens) < 30 and (begun or random_.random() < 0.1):
            going.append((now + 20, tokens))
    blocks.check()
    assert wanted > 100
    assert found > 0.7 * wanted, f"{found} of {wanted}"
