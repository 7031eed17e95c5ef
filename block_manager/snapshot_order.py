"""Decides which snapshots of recurrent state a sequence takes, and in which order snapshots are evicted.

A state may be as large as the K/V of hundreds of tokens, so a snapshot after every page would use up the
memory. Each sequence takes snapshots at two kinds of positions:

tail       after its last full page, where the next message of a conversation begins. A decoding sequence has
           one tail, which moves from page to page
junction   after the last cached page, if no snapshot exists there: the end of several prompts' common prefix

If a slot is no bigger than a page, every page gets a snapshot.
"""

from __future__ import annotations

from collections import OrderedDict, abc
from heapq import heapify, heappop, heappush

from .hit_statistics import AGES, NUM_AGES, AgeHistogram, HitStatistics, kind_of
from .types import Digest, PageId


def wanted_snapshots(
    start: int,
    stop: int,
    *,
    page_size: int,
    junction: int,
    every_page: bool,
    num_known: int,
    with_tail: bool = True,
) -> list[int]:
    """Return the snapshots that a step should take, each as the number of full pages before it.

    The step computes positions [start, stop) of a sequence, which has ``num_known`` tokens so far.

    junction    number of cached pages found (0: no snapshot is wanted after them)
    with_tail   whether a snapshot is wanted after the last full page
    """
    first, last = start // page_size + 1, stop // page_size  # pages that the step completes
    if every_page:
        return list(range(first, last + 1))
    pages = {junction} if first <= junction <= last else set()
    tail = num_known // page_size  # this page may be full before a prompt's last step
    if with_tail and first <= tail <= last:
        pages.add(tail)
    return sorted(pages)


MIN_REMEMBERED = 16_384  # records of evicted snapshots to keep, at least (300 bytes each)
RERANK_FIRST, RERANK_LAST = 16, 128  # releases between two rankings of all snapshots: at first, and later
SLOTS_PER_RELEASE = 4  # with many snapshots: one release per 4 of them between two rankings
PRICE_STEP, MAX_PRICE = 1.003, 8.0
SHARED = 2  # a snapshot with more hits than this is taken to be shared by several conversations
TAIL, JUNCTION, CONTINUED = range(3)  # classes of snapshots, passed to ``kind_of`` as ``gap``


class _Record:
    """Facts about one snapshot; a record is kept for a while after its snapshot is evicted."""

    __slots__ = (
        "age", "is_awaited", "is_junction", "is_stepped_down", "num_hits", "num_new", "num_pages",
        "released_at", "seen", "serial", "slot", "turns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.num_pages = 0  # pages before the snapshot, which a hit saves
        self.turns = 0  # how often its conversation was continued before
        self.num_new = 0  # new pages since the conversation was last continued
        self.is_junction = False
        self.is_stepped_down = False  # whether it is evicted first, because a longer snapshot exists
        self.num_hits = 0  # sequences that continued from it, or would have if it had not been evicted
        self.slot: PageId | None = None  # its slot, while it may be evicted
        self.seen: AgeHistogram | None = None  # histogram of its kind at its last release
        self.is_awaited = False  # whether it was released, and not hit since
        self.released_at = 0
        self.age = 0
        self.serial = 0  # serial number of its valid heap entry

    @property
    def kind(self) -> int:
        """The kind of snapshots, as from ``kind_of``, whose statistics apply to this one."""
        what = JUNCTION if self.is_junction else CONTINUED if self.num_hits else TAIL
        return kind_of(uses=self.turns + self.num_hits, num_new=self.num_new, gap=what)


class SnapshotOrder:
    """Eviction policy for snapshots: the one with the least expected gain goes first.

    The gain is the number of pages that a hit saves, divided by the bytes that the snapshot and its pages
    take, times its Gittins index: the expected hits per time if the snapshot is kept (``HitStatistics``).

    Records of evicted snapshots are kept, because a prompt that begins with their pages would have hit them.
    So the statistics do not depend on what is evicted, and a conversation is recognized even if its first
    snapshot is gone. Time is counted in releases.

    A release, a hit or a change of age takes O(log n) per snapshot; all are ranked again from time to time.

    page_bytes   bytes of a page
    bytes_kept   bytes of a snapshot
    price        weight of bytes of pages; bytes of slots are divided by it. It rises when snapshots are
                 evicted for lack of pages and falls when they are evicted for lack of slots, until both run
                 short together
    """

    def __init__(self, num_slots: int, *, page_bytes: int, bytes_kept: int) -> None:
        self.price = 1.0
        self._page_bytes = page_bytes
        self._bytes_kept = bytes_kept
        self._num_short = 0  # evictions for lack of pages minus those for lack of slots
        self._most_remembered = max(MIN_REMEMBERED, 4 * num_slots)
        self._records: dict[Digest, _Record] = {}  # records of present snapshots, by digest of the last page
        self._gone: OrderedDict[Digest, _Record] = OrderedDict()  # records of evicted snapshots
        self._listed: dict[PageId, _Record] = {}  # records of snapshots that may be evicted
        self._now = 0
        self._due: dict[int, list[_Record]] = {}  # records by the time at which they reach their next age
        # Each entry has value, time of release, serial number and record.
        self._heap: list[tuple[float, int, int, _Record]] = []
        self._serial = 0
        self._statistics = HitStatistics()
        self._rerank_at = RERANK_FIRST

    # Present and evicted snapshots.

    def add(
        self, digest: Digest, num_pages: int, *, turns: int = 0, num_new: int = 0, is_junction: bool = False
    ) -> None:
        """Record a new snapshot after ``num_pages`` pages, the last of which has this digest.

        turns     how often its conversation was continued before
        num_new   new pages since then, in units of ``RecurrentState.turn_pages``
        """
        record = self._gone.pop(digest) if digest in self._gone else _Record()
        self._records[digest] = record
        record.num_pages, record.turns, record.num_new = num_pages, turns, num_new
        record.is_junction, record.is_stepped_down = is_junction, False

    def lose(self, digest: Digest) -> None:
        """Record that a snapshot is no longer cached."""
        self._gone[digest] = self._records.pop(digest)
        if len(self._gone) > self._most_remembered:
            self._gone.popitem(last=False)[1].is_awaited = False

    def forget(self, digest: Digest) -> None:
        """Drop the record of an evicted snapshot, because a later one of its sequence replaced it."""
        record = self._gone.pop(digest, None)
        if record is not None:
            record.is_awaited = False

    def last_known(self, digests: abc.Sequence[Digest]) -> int:
        """Return the number of pages before the last present or evicted snapshot; 0 if none is known."""
        for num_pages in range(len(digests), 0, -1):
            if digests[num_pages - 1] in self._records or digests[num_pages - 1] in self._gone:
                return num_pages
        return 0

    def go_on(self, digest: Digest) -> int:
        """Record that a sequence continues from a snapshot, or would if it had not been evicted.

        Return how often the sequence's conversation has been continued, this time included.
        """
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
        """Return how many sequences continued from a present snapshot."""
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
        self._num_short -= num_pages if self._listed else 0  # nothing is listed: slots are not short
        return pages

    def next(self) -> PageId:
        """Return the listed snapshot to evict next."""
        while True:
            _, _, serial, record = self._heap[0]
            if record.slot is not None and record.serial == serial:
                return record.slot
            heappop(self._heap)

    def demote(self, page: PageId, *, most_hits: int) -> None:
        """Make an idle snapshot the next to evict, unless it has more than ``most_hits`` hits."""
        record = self._listed.get(page)
        if record is not None and record.num_hits <= most_hits:
            record.is_stepped_down = True
            self._rank(record)

    def want_pages(self) -> None:
        """Record that a snapshot is about to be evicted for lack of pages, while slots are free."""
        self._num_short += 1

    def check(self, digests: abc.Collection[Digest]) -> None:
        """Raise AssertionError unless the records match ``digests``, those of all present snapshots.

        All snapshots that may be evicted must be ranked.
        """
        assert self._records.keys() == set(digests), "a snapshot without a record, or the opposite"
        assert self._gone.keys().isdisjoint(self._records), "a snapshot is there and gone"
        assert len(self._gone) <= self._most_remembered, "more is remembered than was promised"
        listed = {record.slot: record for record in self._records.values() if record.slot is not None}
        assert listed == self._listed, "a listed snapshot is in another slot"
        ranked = {record.slot for _, _, serial, record in self._heap if record.serial == serial}
        assert self._listed.keys() <= ranked, "a listed snapshot would never go"

    def _grow_older(self, record: _Record) -> None:
        """Move a record to its next age, unless its snapshot was hit or released again in the meantime."""
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
        """Push a heap entry with the snapshot's current value; older entries become invalid."""
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
        """Compute the values of all listed snapshots again, from the latest statistics."""
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
