"""Rules for taking snapshots of recurrent state, and their eviction policy.

A snapshot may be as large as the K/V of hundreds of tokens, so each sequence takes only two kinds:

tail       after its last full page, where the next message of a conversation begins
branch     after the last cached page, where prompts with a common prefix branch off

If a slot is no bigger than a page, every page gets a snapshot.
"""

from __future__ import annotations

from collections import OrderedDict, abc
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from .hit_statistics import AGES, NUM_AGES, AgeHistogram, HitStatistics, kind_of
from .types import Digest, PageId


def wanted_snapshots(
    start: int,
    stop: int,
    *,
    page_size: int,
    branch: int,
    every_page: bool,
    num_known: int,
    with_tail: bool = True,
) -> list[int]:
    """Return the snapshots that a step should take, each as the number of full pages before it.

    The step computes positions ``[start, stop)``. The sequence has ``num_known`` tokens so far.
    """
    first, last = start // page_size + 1, stop // page_size
    if every_page:
        return list(range(first, last + 1))
    pages = {branch} if first <= branch <= last else set()
    tail = num_known // page_size
    if with_tail and first <= tail <= last:
        pages.add(tail)
    return sorted(pages)


MIN_REMEMBERED = 16_384  # smallest number of evicted snapshots to remember (300 bytes each)
RERANK_FIRST, RERANK_LAST = 16, 128
SLOTS_PER_RELEASE = 4
PRICE_STEP, MAX_PRICE = 1.003, 8.0
SHARED = 2  # a snapshot with more hits than this counts as shared by several conversations
TAIL, BRANCH, CONTINUED = range(3)


@dataclass(slots=True, eq=False)
class _Record:
    num_pages: int = 0
    turns: int = 0
    num_new: int = 0
    is_branch: bool = False
    is_demoted: bool = False
    num_hits: int = 0
    slot: PageId | None = None
    seen: AgeHistogram | None = None
    is_awaited: bool = False
    released_at: int = 0
    age: int = 0
    serial: int = 0

    @property
    def kind(self) -> int:
        what = BRANCH if self.is_branch else CONTINUED if self.num_hits else TAIL
        return kind_of(uses=self.turns + self.num_hits, num_new=self.num_new, gap=what)


class SnapshotOrder:
    """Eviction policy for snapshots: evict the snapshot with the lowest expected gain first.

    The gain is (pages saved by a hit) / (bytes of the snapshot and its pages) x (its Gittins index). Evicted
    snapshots are remembered, so the hit statistics do not depend on evictions.
    """

    def __init__(self, num_slots: int, *, page_bytes: int, snapshot_bytes: int) -> None:
        self.price = 1.0
        self._page_bytes = page_bytes
        self._snapshot_bytes = snapshot_bytes
        self._num_short = 0
        self._max_remembered = max(MIN_REMEMBERED, 4 * num_slots)
        self._records: dict[Digest, _Record] = {}
        self._evicted: OrderedDict[Digest, _Record] = OrderedDict()
        self._listed: dict[PageId, _Record] = {}
        self._now = 0
        self._due: dict[int, list[_Record]] = {}
        self._heap: list[tuple[float, int, int, _Record]] = []
        self._serial = 0
        self._statistics = HitStatistics()
        self._rerank_at = RERANK_FIRST

    def add(
        self, digest: Digest, num_pages: int, *, turns: int = 0, num_new: int = 0, is_branch: bool = False
    ) -> None:
        record = self._evicted.pop(digest) if digest in self._evicted else _Record()
        self._records[digest] = record
        record.num_pages, record.turns, record.num_new = num_pages, turns, num_new
        record.is_branch, record.is_demoted = is_branch, False

    def record_eviction(self, digest: Digest) -> None:
        self._evicted[digest] = self._records.pop(digest)
        if len(self._evicted) > self._max_remembered:
            self._evicted.popitem(last=False)[1].is_awaited = False

    def forget(self, digest: Digest) -> None:
        """Drop the record of an evicted snapshot, because a later one of its sequence replaced it."""
        record = self._evicted.pop(digest, None)
        if record is not None:
            record.is_awaited = False

    def last_known(self, digests: abc.Sequence[Digest]) -> int:
        """Return the number of pages before the latest known snapshot, or 0.

        The snapshot may be cached or evicted.
        """
        for num_pages in range(len(digests), 0, -1):
            if digests[num_pages - 1] in self._records or digests[num_pages - 1] in self._evicted:
                return num_pages
        return 0

    def record_hit(self, digest: Digest) -> int:
        record = self._records.get(digest) or self._evicted[digest]
        if record.is_awaited:
            assert record.seen is not None
            record.seen.reached[record.age] += 1
            record.seen.used[record.age] += 1
            record.is_awaited = False
        record.num_hits += 1
        record.is_demoted = False
        return 0 if record.is_branch or record.num_hits > SHARED else record.turns + 1

    def num_hits(self, digest: Digest) -> int:
        return self._records[digest].num_hits

    def __len__(self) -> int:
        return len(self._listed)

    def __iter__(self) -> abc.Iterator[PageId]:
        return iter(self._listed)

    def release(self, pages: abc.Sequence[PageId], digests: abc.Sequence[Digest | None]) -> None:
        for page in pages:
            self._now += 1
            for record in self._due.pop(self._now, ()):
                self._advance_age(record)
            if self._now >= self._rerank_at:
                self._rerank()
            digest = digests[page]
            assert digest is not None, "the slot was released without a digest"
            record = self._listed[page] = self._records[digest]
            record.slot = page
            if not record.is_awaited:
                record.seen = self._statistics.seen(record.kind)
                record.is_awaited, record.released_at, record.age = True, self._now, 0
                self._due.setdefault(self._now + AGES[1], []).append(record)
            self._rank(record)

    def reuse(self, pages: abc.Sequence[PageId]) -> None:
        for page in pages:
            record = self._listed.pop(page, None)
            if record is not None:
                record.slot = None

    def evict(self, num_pages: int) -> list[PageId]:
        pages = []
        for _ in range(num_pages):
            pages.append(self.next())
            self.reuse(pages[-1:])
        self._num_short -= num_pages if self._listed else 0
        return pages

    def next(self) -> PageId:
        while True:
            _, _, serial, record = self._heap[0]
            if record.slot is not None and record.serial == serial:
                return record.slot
            heappop(self._heap)

    def demote(self, page: PageId, *, max_hits: int) -> None:
        """Make an idle snapshot the next to evict, unless it has more than ``max_hits`` hits."""
        record = self._listed.get(page)
        if record is not None and record.num_hits <= max_hits:
            record.is_demoted = True
            self._rank(record)

    def note_page_shortage(self) -> None:
        self._num_short += 1

    def check(self, digests: abc.Collection[Digest]) -> None:
        """Raise AssertionError unless the records match ``digests``, the digests of all present snapshots."""
        assert self._records.keys() == set(digests), "a snapshot has no record, or a record has no snapshot"
        assert self._evicted.keys().isdisjoint(self._records), "a snapshot is both cached and evicted"
        assert len(self._evicted) <= self._max_remembered, "too many evicted snapshots are kept"
        listed = {record.slot: record for record in self._records.values() if record.slot is not None}
        assert listed == self._listed, "a snapshot is listed under another slot"
        ranked = {record.slot for _, _, serial, record in self._heap if record.serial == serial}
        assert self._listed.keys() <= ranked, "a listed snapshot could never be evicted"

    def _advance_age(self, record: _Record) -> None:
        if not record.is_awaited or self._now != record.released_at + AGES[record.age + 1]:
            return
        assert record.seen is not None
        record.seen.reached[record.age] += 1
        record.age += 1
        if record.age + 1 < NUM_AGES:
            self._due.setdefault(record.released_at + AGES[record.age + 1], []).append(record)
        if record.slot is not None:
            self._rank(record)

    def _rank(self, record: _Record) -> None:
        self._serial += 1
        record.serial = self._serial
        heappush(self._heap, (self._value(record), record.released_at, record.serial, record))

    def _value(self, record: _Record) -> float:
        if record.is_demoted:
            return 0.0
        assert record.seen is not None
        num_bytes = record.num_pages * self._page_bytes * self.price + self._snapshot_bytes / self.price
        return record.num_pages / num_bytes * self._statistics.indices(record.seen.kind)[record.age]

    def _rerank(self) -> None:
        most = max(RERANK_LAST, len(self._listed) // SLOTS_PER_RELEASE)
        self._rerank_at = self._now + min(max(self._now // 8, RERANK_FIRST), most)
        self._statistics.refresh(self._now)
        self.price = min(max(self.price * PRICE_STEP**self._num_short, 1 / MAX_PRICE), MAX_PRICE)
        self._num_short = 0
        self._heap = [
            (self._value(record), record.released_at, record.serial, record)
            for record in self._listed.values()
        ]
        heapify(self._heap)
