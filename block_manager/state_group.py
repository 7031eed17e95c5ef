"""The pool of recurrent states: a running slot per sequence, and cached snapshots.

A state changes with every token. A *running* slot has a sequence's latest state. A *snapshot* is a copy of
the state at the end of a full page, published under the page's digest.
"""

from __future__ import annotations

from collections import Counter, abc

from .cache_group import CacheGroup, Fill
from .page_pool import PagePool
from .policies import make_policy
from .snapshot_order import SnapshotOrder, wanted_snapshots
from .spec import RecurrentState
from .types import Digest, PageCopy, PageId, PageTable, PlannedSnapshot, TableState


class CoveredPages:
    """The pages before present snapshots; such a page is *covered*."""

    def __init__(self) -> None:
        self._counts: Counter[Digest] = Counter()
        self._before: dict[Digest, Digest | None] = {}

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._counts

    def add(self, digests: abc.Sequence[Digest], num_pages: int) -> None:
        for index in range(num_pages - 1, -1, -1):
            digest = digests[index]
            self._counts[digest] += 1
            if self._counts[digest] > 1:
                return
            self._before[digest] = digests[index - 1] if index else None

    def remove(self, digest: Digest) -> list[Digest]:
        """Remove the snapshot after this page; return the pages that are no longer covered, last first."""
        lost = []
        last: Digest | None = digest
        while last is not None:
            self._counts[last] -= 1
            if self._counts[last]:
                break
            del self._counts[last]
            lost.append(last)
            last = self._before.pop(last)
        return lost

    def check(self, snapshots: abc.Iterable[Digest]) -> None:
        """Raise AssertionError unless the counts match exactly these snapshots."""
        expected = Counter(snapshots)
        expected.update(before for before in self._before.values() if before is not None)
        assert expected == self._counts, "the snapshots that cover a page are miscounted"


BeginCopy = abc.Callable[[CacheGroup, PageId, PageId], None]
"""Function (group, source, target) that requests a copy of a slot and holds both slots until it is made."""


class StateGroup(CacheGroup):
    """Allocates, finds and releases the recurrent slots of all page tables."""

    spec: RecurrentState

    def __init__(
        self,
        index: int,
        spec: RecurrentState,
        page_size: int,
        *,
        pages: abc.Sequence[PagePool] = (),
        clock: abc.Callable[[], float],
    ) -> None:
        self.index = index
        self.spec = spec
        self._order = (
            None
            if spec.every_page
            else SnapshotOrder(spec.num_slots, page_bytes=spec.page_bytes, snapshot_bytes=spec.slot_bytes)
        )
        policy = make_policy("lru", spec.num_slots) if self._order is None else self._order
        self.pool = PagePool(spec.num_slots, policy, clock=clock)
        self.pool.on_forgotten = self._discard_pages
        self._pages = pages
        for pool in pages:
            pool.on_forgotten = self.pool.discard
        self._covered = CoveredPages()
        self._num_drafted = 0
        self._page_size = page_size

    def longest_prefix(
        self,
        digests: abc.Sequence[Digest],
        num_pages: int,
        table: PageTable | None = None,  # noqa: ARG002
    ) -> int:
        is_cached = self.pool.is_cached
        num_pages = min(num_pages, len(digests))
        while num_pages and not is_cached(digests[num_pages - 1]):
            num_pages -= 1
        return num_pages

    def open(self, table: PageTable) -> None:
        table.state = TableState()

    def find(self, table: PageTable, digests: abc.Sequence[Digest], num_pages: int, branch: int) -> None:
        state = _state(table)
        state.branch = branch
        self.hold_snapshot(state, digests, num_pages)

    def hold_snapshot(self, state: TableState, digests: abc.Sequence[Digest], num_pages: int) -> None:
        if num_pages:
            (state.found,) = self.pool.acquire([digests[num_pages - 1]])

    def has_slot(self, table: PageTable) -> bool:
        """Return whether the table has a running slot, or can get one."""
        state = _state(table)
        return state.running is not None or self.pool.num_idle > 0 or self._can_become_running(state.found)

    def start(self, table: PageTable, copy: BeginCopy) -> None:
        """Give a table a running slot with the state of its found snapshot.

        If no slot is idle, the snapshot itself becomes the running slot.
        """
        state = _state(table)
        if state.running is not None:
            return
        self._record_use(table, table.num_written // self._page_size)
        if not self.pool.num_idle and state.found is not None:
            self.pool.unpublish(state.found)
            state.running, state.found = state.found, None
            return
        state.running = self._take()
        if state.found is not None:
            copy(self, state.found, state.running)
            self._release([state.found])
            state.origin, state.found = state.found, None

    def fork(self, table: PageTable, forked: PageTable, copy: BeginCopy) -> None:
        """Give a forked table its own running slot, and request a copy of the state."""
        running = _state(table).running
        assert running is not None, "a forked table was never written"
        slot = self._take()
        copy(self, running, slot)
        forked.state = TableState(running=slot)

    def restore(self, table: PageTable, num_pages: int, copy: BeginCopy) -> None:
        """Request a copy of the snapshot after ``num_pages`` pages into the running slot (0: no copy).

        A table without a running slot holds the snapshot instead.
        """
        state = _state(table)
        before, state.found = state.found, None
        self.hold_snapshot(state, table.digests, num_pages)
        if before is not None:
            self._release([before])
        if state.running is None or state.found is None:
            return
        copy(self, state.found, state.running)
        self._release([state.found])
        state.found = None

    def plan_snapshots(self, table: PageTable, start: int, stop: int, *, num_known: int) -> None:
        """Allocate slots for the snapshots that a step takes, while slots are idle.

        The step computes positions ``[start, stop)``. The sequence has ``num_known`` tokens so far.
        """
        state = _state(table)
        self._drop_planned(state)
        pages = wanted_snapshots(
            start,
            stop,
            page_size=self._page_size,
            branch=state.branch if self.spec.branch else 0,
            every_page=self.spec.every_page,
            num_known=num_known,
            with_tail=self.spec.tail,
        )
        known = table.digests
        kept: list[PageId] = []
        for page in pages:
            if page <= len(known) and (found := self.pool.acquire(known[page - 1 : page])):
                kept += found
                continue
            if not self.pool.num_idle:
                break
            planned = PlannedSnapshot(page * self._page_size, self._take(), page == state.branch)
            state.planned.append(planned)
        self.pool.decref(kept)

    def num_draftable(self, num_running: int) -> int:
        """Return how many draft tokens a step with ``num_running`` sequences can have.

        Each draft needs a slot. One more slot per sequence stays free for a snapshot.
        """
        idle = self.pool.num_idle - num_running
        return max(0, min(idle, self.spec.max_drafted - self._num_drafted))

    def plan_drafts(self, table: PageTable, stop: int, count: int) -> None:
        """Allocate a slot for the state after ``stop`` and after each draft but the last."""
        state = _state(table)
        assert all(position < stop for position, _ in state.drafted), "drafts were planned twice"
        state.drafted += [(stop + index, self._take()) for index in range(count)]
        self._num_drafted += count

    def accept(self, table: PageTable) -> None:
        """Make the slot with the state after ``num_written`` positions the running slot.

        The other draft slots are released.
        """
        state = _state(table)
        if not state.drafted:
            return
        running = state.running
        for position, slot in state.drafted:
            if position == table.num_written:
                running, slot = slot, running  # noqa: PLW2901
            assert slot is not None, "drafts were computed without a slot"
            self._release([slot])
        self._num_drafted -= len(state.drafted)
        state.running, state.drafted = running, []
        self._drop_planned(state, behind=table.num_written)

    def commit(self, table: PageTable) -> None:
        """Publish the snapshots of a computed step."""
        state = _state(table)
        planned, state.planned = state.planned, []
        for position, slot, is_branch in planned:
            page = position // self._page_size
            assert position % self._page_size == 0, "a snapshot must be at a page's end"
            assert position <= table.num_written, "a snapshot is ahead of its page"
            self._publish(slot, table.digests, page, state=state, is_branch=is_branch, salt=table.salt)
            self.pool.decref([slot])
            if self.pool.is_published(slot) and not (is_branch or self.spec.every_page):
                self._demote_earlier(state)
                state.tail, state.tail_digest = slot, table.digests[page - 1]

    def insert(
        self,
        digests: abc.Sequence[Digest],
        first: int,
        fill: Fill,
        *,
        salt: bytes = b"",
        contents: abc.Sequence[bytes] = (),  # noqa: ARG002
    ) -> int | None:
        """Publish snapshots that ``fill`` writes, one after each page from ``first`` on.

        Return None, and change nothing, if too few slots are idle or a page is not cached.
        """
        if any(pool.prefix_length(digests) < len(digests) for pool in self._pages):
            return None
        pool = self.pool
        held = [slot for digest in digests if pool.is_cached(digest) for slot in pool.acquire([digest])]
        missing = [index for index in range(first, len(digests)) if not pool.is_cached(digests[index])]
        new = None
        if len(missing) <= pool.num_idle:
            new = [self._take() for _ in missing]
        try:
            if new:
                fill(missing, new)
                for index, slot in zip(missing, new, strict=True):
                    self._publish(slot, digests, index + 1, salt=salt)
        finally:
            pool.decref([*held, *(new or [])])
        return None if new is None else len(new)

    def evict_for(self, pool: PagePool, num_pages: int) -> None:
        """Evict snapshots and their pages until ``num_pages`` pages of a pool are empty.

        At most one snapshot is evicted per missing page.
        """
        if self._order is None or pool not in self._pages:
            return
        for _ in range(num_pages - pool.num_idle_empty):
            if pool.num_idle_empty >= num_pages or not len(self._order):
                return
            if self.pool.num_idle > len(self._order):
                self._order.note_page_shortage()
            self.pool.discard([self.pool.digest(self._order.next())])

    def close(self, table: PageTable) -> None:
        """Release every slot of a table, and drop its pages after its last snapshot from the cache.

        Earlier pages and published snapshots stay cached.
        """
        state = _state(table)
        self._drop_planned(state)
        self._release([slot for slot in (state.found, state.running) if slot is not None])
        self._release([slot for _, slot in state.drafted])
        self._num_drafted -= len(state.drafted)
        state.found, state.running, state.drafted = None, None, []
        num_pages = len(table.digests)
        while num_pages and table.digests[num_pages - 1] not in self._covered:
            num_pages -= 1
        for pool in self._pages:
            pool.discard(reversed(table.digests[num_pages:]))

    def held_pages(self, table: PageTable) -> list[PageId]:
        state = _state(table)
        one = [slot for slot in (state.running, state.found) if slot is not None]
        return one + [planned.slot for planned in state.planned] + [slot for _, slot in state.drafted]

    def check(self, tables: abc.Iterable[PageTable], copies: abc.Iterable[PageCopy]) -> None:
        """Raise AssertionError unless each slot's holder count matches the tables and copies."""
        self.pool.check()
        self._covered.check(self.pool.digests())
        if self._order is not None:
            self._order.check(self.pool.digests())
        held = Counter(slot for table in tables for slot in self.held_pages(table))
        held.update(slot for copy in copies for slot in (copy.source, copy.target))
        for slot in map(PageId, range(self.pool.num_pages)):
            assert self.pool.ref_count(slot) == held[slot], f"slot {slot} is not held {held[slot]} times"
        running = Counter(state.running for state in map(_state, tables) if state.running is not None)
        assert all(count == 1 for count in running.values()), "two tables write one slot"
        drafted = [slot for table in tables for _, slot in _state(table).drafted]
        written = [*running, *drafted, *(p.slot for table in tables for p in _state(table).planned)]
        assert len(set(written)) == len(written), "a slot is written twice in a step"
        assert not any(map(self.pool.is_published, written)), "a slot is published but still written"
        assert self._num_drafted == len(drafted) <= self.spec.max_drafted, "draft states are miscounted"
        for table in tables:
            assert (
                table.num_written == 0 or _state(table).running is not None or _state(table).found is not None
            ), "a table has positions and no state"

    def _can_become_running(self, found: PageId | None) -> bool:
        return found is not None and self.pool.ref_count(found) == 1

    def _take(self) -> PageId:
        slots = self.pool.allocate(1)
        assert slots is not None, "a slot is taken although no slot is idle"
        return slots[0]

    def _release(self, slots: abc.Sequence[PageId]) -> None:
        self.pool.decref(slots)

    def _drop_planned(self, state: TableState, *, behind: int = 0) -> None:
        dropped = [planned for planned in state.planned if planned.position > behind]
        self._release([planned.slot for planned in dropped])
        state.planned = [planned for planned in state.planned if planned.position <= behind]

    def _publish(
        self,
        slot: PageId,
        digests: abc.Sequence[Digest],
        num_pages: int,
        *,
        salt: bytes,
        state: TableState | None = None,
        is_branch: bool = False,
    ) -> None:
        parent = digests[num_pages - 2] if num_pages > 1 else None
        self.pool.publish([slot], [digests[num_pages - 1]], parent, salt=salt)
        if self.pool.is_published(slot):
            self._covered.add(digests, num_pages)
            if self._order is None:
                return
            if state is None or is_branch:
                self._order.add(digests[num_pages - 1], num_pages, is_branch=is_branch)
            else:
                num_new = -(-state.num_new // self.spec.turn_pages)
                self._order.add(digests[num_pages - 1], num_pages, turns=state.turns, num_new=num_new)

    def _record_use(self, table: PageTable, num_found: int) -> None:
        if self._order is None:
            return
        state, digests = _state(table), table.digests
        known = self._order.last_known(digests)
        state.num_new = len(digests) - known
        if known:
            state.turns = self._order.record_hit(digests[known - 1])
        if state.found is not None and known != num_found:
            self._order.record_hit(digests[num_found - 1])

    def _discard_pages(self, snapshots: abc.Iterable[Digest]) -> None:
        lost = []
        for snapshot in snapshots:
            lost += self._covered.remove(snapshot)
            if self._order is not None:
                self._order.record_eviction(snapshot)
        for pool in self._pages:
            pool.num_evicted += pool.discard(lost)

    def _demote_earlier(self, state: TableState) -> None:
        if not self.spec.demote_earlier or self._order is None:
            return
        tail, origin, order = state.tail, state.origin, self._order
        is_found = tail is not None and self.pool.lookup(state.tail_digest) == tail
        if is_found and not order.num_hits(state.tail_digest):
            self.pool.discard([state.tail_digest])
            order.forget(state.tail_digest)
        if origin is not None and self.pool.is_published(origin):
            order.demote(origin, max_hits=1)
        state.origin = None


def _state(table: PageTable) -> TableState:
    assert table.state is not None, "a table without state in a manager with recurrent layers"
    return table.state
