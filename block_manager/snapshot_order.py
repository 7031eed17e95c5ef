"""Which snapshot of recurrent state goes first: the one that promises least for its bytes."""

from __future__ import annotations

from collections import OrderedDict, abc
from heapq import heapify, heappop, heappush

from .hit_statistics import AGES, NUM_AGES, AgeHistogram, HitStatistics, kind_of
from .types import Digest, PageId

MIN_REMEMBERED = 16_384  # snapshots that are gone, or four for each slot, if that is more; of 300 bytes each
RERANK_FIRST, RERANK_LAST = 16, 128  # releases between two rankings: at first, and in the long run
SLOTS_PER_RELEASE = 4  # as many at least for each release between two rankings, in the long run
PRICE_STEP, MAX_PRICE = 1.003, 8.0
SHARED = 2  # what more sequences went on from is no turn of one conversation
TAIL, JUNCTION, CONTINUED = range(3)  # told apart as gaps are in ``kind_of``


class _Record:
    """What is known of one snapshot by the digest of its page; it outlives the snapshot for a while."""

    __slots__ = (
        "age", "is_awaited", "is_junction", "is_stepped_down", "num_hits", "num_new", "num_pages",
        "released_at", "seen", "serial", "slot", "turns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.num_pages = 0  # that a hit saves
        self.turns = 0  # how often its conversation had gone on before
        self.num_new = 0  # what its turn brought
        self.is_junction = False
        self.is_stepped_down = False
        self.num_hits = 0  # sequences that went on from it, or would have
        self.slot: PageId | None = None  # where it is listed
        self.seen: AgeHistogram | None = None  # where its kind is counted, since its last release
        self.is_awaited = False  # released, and not found since
        self.released_at = 0
        self.age = 0
        self.serial = 0  # of its one valid entry in the heap

    @property
    def kind(self) -> int:
        """Snapshots that are alike.

        By how often they or their conversations went on, and by what a turn brought."""
        what = JUNCTION if self.is_junction else CONTINUED if self.num_hits else TAIL
        return kind_of(uses=self.turns + self.num_hits, num_new=self.num_new, gap=what)


class SnapshotOrder:
    """An eviction policy: the snapshot that promises least goes first.

    It promises the pages that a hit saves over the bytes it takes, times its Gittins index: the most hits per
    time that keeping it for a while can give, by the chances that snapshots of its kind are found at its
    age and later (``HitStatistics``).

    What is evicted is remembered: a prompt that begins with its pages tells that it would have been found.
    So what is learned does not depend on what is kept, and a conversation that comes back for the second
    time is known as such, although its first snapshot had to go. Time is the number of releases.

    O(log n) for each snapshot that is released, found or grows older; all are ranked again now and then.

    page_bytes, bytes_kept   of a page, and of a snapshot
    price   of a page's bytes, and the inverse of that of a slot's. It rises where snapshots go for want of
            pages and falls where they go for want of slots, until both run short together
    """

    def __init__(self, num_slots: int, *, page_bytes: int, bytes_kept: int) -> None:
        self.price = 1.0
        self._page_bytes = page_bytes
        self._bytes_kept = bytes_kept
        self._num_short = 0  # snapshots that went for want of pages, less those that went for want of slots
        self._most_remembered = max(MIN_REMEMBERED, 4 * num_slots)
        self._records: dict[Digest, _Record] = {}  # of what can be found
        self._gone: OrderedDict[Digest, _Record] = OrderedDict()
        self._listed: dict[PageId, _Record] = {}
        self._now = 0
        self._due: dict[int, list[_Record]] = {}  # by time: what reaches its next age
        self._heap: list[tuple[float, int, int, _Record]] = []  # value, when released, serial
        self._serial = 0
        self._statistics = HitStatistics()
        self._rerank_at = RERANK_FIRST

    # What there is, and was.

    def add(
        self, digest: Digest, num_pages: int, *, turns: int = 0, num_new: int = 0, is_junction: bool = False
    ) -> None:
        """There is a snapshot after ``num_pages`` pages, the last of which has this digest.

        turns     how often its conversation had gone on before
        num_new   what its turn brought, told apart by powers of two
        """
        record = self._gone.pop(digest) if digest in self._gone else _Record()
        self._records[digest] = record
        record.num_pages, record.turns, record.num_new = num_pages, turns, num_new
        record.is_junction, record.is_stepped_down = is_junction, False

    def lose(self, digest: Digest) -> None:
        """A snapshot can be found no longer."""
        self._gone[digest] = self._records.pop(digest)
        if len(self._gone) > self._most_remembered:
            self._gone.popitem(last=False)[1].is_awaited = False

    def forget(self, digest: Digest) -> None:
        """A snapshot that is gone would not have been found: a later one of its sequence took its place."""
        record = self._gone.pop(digest, None)
        if record is not None:
            record.is_awaited = False

    def last_known(self, digests: abc.Sequence[Digest]) -> int:
        """Return after how many of these pages there is or was the last snapshot; 0 if there is none."""
        for num_pages in range(len(digests), 0, -1):
            if digests[num_pages - 1] in self._records or digests[num_pages - 1] in self._gone:
                return num_pages
        return 0

    def go_on(self, digest: Digest) -> int:
        """A sequence goes on from a snapshot, or would if that were not gone.

        Return how often its conversation has gone on now."""
        record = self._records.get(digest) or self._gone[digest]
        if record.is_awaited:
            assert record.seen is not None
            record.seen.reached[record.age] += 1
            record.seen.used[record.age] += 1
            record.is_awaited = False
        record.num_hits += 1
        record.is_stepped_down = False
        return 0 if record.is_junction or record.num_hits > SHARED else record.turns + 1

    def num_hits(self, digest: Digest) -> int:
        """Return how many sequences went on from a snapshot that there is."""
        return self._records[digest].num_hits

    # The policy.

    def __len__(self) -> int:
        return len(self._listed)

    def __iter__(self) -> abc.Iterator[PageId]:
        return iter(self._listed)

    def release(self, pages: abc.Sequence[PageId], digests: abc.Sequence[Digest | None]) -> None:
        for page in pages:
            self._now += 1
            for record in self._due.pop(self._now, ()):
                self._grow_older(record)
            if self._now >= self._rerank_at:
                self._rerank()
            digest = digests[page]
            assert digest is not None, "released without a digest"
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
        self._num_short -= num_pages if self._listed else 0  # nothing is left: that was no want of slots
        return pages

    def next(self) -> PageId:
        """The listed snapshot that goes first."""
        while True:
            _, _, serial, record = self._heap[0]
            if record.slot is not None and record.serial == serial:
                return record.slot
            heappop(self._heap)

    def demote(self, page: PageId, *, most_hits: int) -> None:
        """Let an idle snapshot go next, unless more sequences went on from it."""
        record = self._listed.get(page)
        if record is not None and record.num_hits <= most_hits:
            record.is_stepped_down = True
            self._rank(record)

    def want_pages(self) -> None:
        """The next snapshot goes for want of pages, while there are slots."""
        self._num_short += 1

    def check(self, digests: abc.Collection[Digest]) -> None:
        """Raise AssertionError unless it knows the snapshots with these digests, and ranks the listed ones.

        Those are the snapshots that can be found."""
        assert self._records.keys() == set(digests), "a snapshot without a record, or the opposite"
        assert self._gone.keys().isdisjoint(self._records), "a snapshot is there and gone"
        assert len(self._gone) <= self._most_remembered, "more is remembered than was promised"
        listed = {record.slot: record for record in self._records.values() if record.slot is not None}
        assert listed == self._listed, "a listed snapshot is in another slot"
        ranked = {record.slot for _, _, serial, record in self._heap if record.serial == serial}
        assert self._listed.keys() <= ranked, "a listed snapshot would never go"

    def _grow_older(self, record: _Record) -> None:
        """It reaches its next age, unless it was found since, or even released again."""
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
        """Value a listed snapshot anew; only its next entry in the heap is valid."""
        self._serial += 1
        record.serial = self._serial
        heappush(self._heap, (self._value(record), record.released_at, record.serial, record))

    def _value(self, record: _Record) -> float:
        if record.is_stepped_down:
            return 0.0
        assert record.seen is not None
        num_bytes = record.num_pages * self._page_bytes * self.price + self._bytes_kept / self.price
        return record.num_pages / num_bytes * self._statistics.indices(record.seen.kind)[record.age]

    def _rerank(self) -> None:
        """Value everything by what was learned since the last time."""
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
