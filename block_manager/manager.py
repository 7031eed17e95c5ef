"""Page tables: which page holds which position of which sequence."""

from __future__ import annotations

import time
from collections import abc

from .cache_group import CacheGroup, Fill
from .digests import NO_MEDIA, Hasher, check_strength, extend_chain, page_contents, sha256_chain
from .events import EventLog
from .invariants import check_books
from .kv_group import KVGroup, page_ids
from .miss_reasons import Miss, MissClassifier
from .page_copies import PageCopies
from .page_index import PageContents, PageIndex
from .policies import DEFAULT_POLICY, make_policy
from .prefix_search import PrefixSearch
from .spec import FullAttention, KVGroupSpec, RecurrentState, ResidualWindow, check_groups
from .state_group import StateGroup
from .truncation import Truncation
from .types import Digest, GroupPageTable, MediaSpan, PageCopy, PageCounts, PageId, PageTable


class BlockManager:
    """Gives sequences pages of fixed pools and lets them share what they have in common.

    A table covers the same positions in every group of layers: each operation reaches all groups, or none.
    Where no group is named, pages are those of the first.

    groups           size of the one pool that all layers share; or what each kind of layer sees, and how
                     large its pool is. Let the first be the one without a window, if there is any
    page_size        positions per page
    hasher           names the contents of pages; see digests.py
    prefix_cache     False: nothing is published and every ``open`` starts empty
    policy           which idle page goes next, by its name in ``POLICIES``
    max_pinned       pages of each pool that ``Pins`` may hold; sequences are not let in on them
    max_chunk        positions of one sequence that are written at a time, at most: how far beyond
                     its window a group needs pages
    states           slots of recurrent layers, if the model has any: a sequence needs one beside its pages
    clock            seconds, for saying when a page was evicted

    miss_reasons     says why a page was not found
    page_index       tokens of published pages, from ``keep_tokens`` on

    Who may hold, write and free a page, and when: README.md in this folder.
    """

    def __init__(
        self,
        groups: int | abc.Sequence[KVGroupSpec],
        page_size: int,
        *,
        hasher: Hasher = sha256_chain,
        prefix_cache: bool = True,
        policy: str = DEFAULT_POLICY,
        max_pinned: int = 0,
        max_chunk: int = 512,
        states: RecurrentState | None = None,
        clock: abc.Callable[[], float] = time.monotonic,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}; 32 is a good start")
        specs = (FullAttention(num_pages=groups),) if isinstance(groups, int) else tuple(groups)
        check_groups(specs)
        smallest = min(spec.num_pages for spec in specs)
        if not 0 <= max_pinned < smallest:
            raise ValueError(
                f"max_pinned must be at least 0 and less than the {smallest} pages of the pool, "
                f"got {max_pinned}; sequences need room, too"
            )
        if prefix_cache:
            check_strength(hasher)
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.policy = policy
        self.max_pinned = max_pinned
        self.max_chunk = max_chunk
        self._hasher = hasher
        self._groups = tuple(
            KVGroup(index, spec, page_size, policy=make_policy(policy, spec.num_pages), clock=clock)
            for index, spec in enumerate(specs)
        )
        self._windowed = tuple(group for group in self._groups if group.spec.window is not None)
        self._residual = [group.pool for group in self._groups if isinstance(group.spec, ResidualWindow)]
        full = [group.pool for group in self._groups if group.spec.window is None]
        self._states = tuple(
            StateGroup(len(self._groups) + index, spec, page_size, pages=full, clock=clock)
            for index, spec in enumerate([] if states is None else [states])
        )
        self._all: tuple[CacheGroup, ...] = (*self._groups, *self._states)
        self.groups = specs  # attributes, because each step asks
        self.states = states
        self._pool = self._groups[0].pool
        self._tables: set[PageTable] = set()
        self._copies = PageCopies(self._all)
        self._prefixes = PrefixSearch(self._groups, self._states)
        self._truncation = Truncation(self._groups, self._states, self._prefixes, self._copies)
        self.miss_reasons = MissClassifier(page_size, specs[0].num_pages, evicted=self._prefixes.evicted_at)
        self.page_index = PageIndex(
            specs[0].num_pages,
            is_cached=lambda digest: any(group.pool.is_cached(digest) for group in self._groups),
        )

    # Pools: how large they are and how their pages stand.

    @property
    def parts(self) -> tuple[KVGroupSpec | RecurrentState, ...]:
        """What a cached prefix consists of.

        Pages of every group, and behind them snapshots of recurrent state, if there are any."""
        return tuple(group.spec for group in self._all)

    @property
    def capacity(self) -> int:
        """Positions that one sequence can have, whatever is pinned."""
        return min(
            group.spec.max_positions(self.page_size, max_chunk=self.max_chunk, num_pinned=self.max_pinned)
            for group in self._groups
        )

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def counts(self) -> PageCounts:
        """Return how the pages stand: held, idle and cached, idle and empty."""
        return self._pool.counts

    @property
    def num_held(self) -> int:
        return self._pool.num_pages - self._pool.num_idle

    @property
    def num_idle(self) -> int:
        """Pages that can be handed out: cached and empty ones."""
        return self._pool.num_idle

    @property
    def num_idle_cached(self) -> int:
        return self._pool.num_idle_cached

    @property
    def num_idle_empty(self) -> int:
        return self._pool.num_idle_empty

    @property
    def num_evicted(self) -> int:
        """Cached pages of all groups that were given to somebody else, since the start."""
        return sum([group.pool.num_evicted for group in self._groups])

    def idle_pages(self) -> tuple[int, ...]:
        """``num_idle`` of every group, and idle slots of recurrent states behind them, if there are any."""
        return tuple([group.pool.num_idle for group in self._all])

    def idle_for_pages(self) -> tuple[int, ...]:
        """``num_idle`` of every group."""
        return tuple([group.pool.num_idle for group in self._groups])

    def growth(self, table: PageTable, num_tokens: int) -> tuple[int, ...]:
        """Return how many more pages of every group a table holds at most, once it has so many positions."""
        goal = -(-num_tokens // self.page_size)
        return tuple(
            max(
                0,
                min(goal, group.spec.max_pages(self.page_size, max_chunk=self.max_chunk))
                - len(group.live_indices(part) if group.spec.window else part.pages),
            )
            for group, part in zip(self._groups, table.parts, strict=True)
        )

    def num_shared(self, table: PageTable) -> int:
        """Return how many positions of its beginning are on pages that other tables hold, too.

        0 in models whose every layer has a window."""
        if self._groups[0].spec.window is not None:
            return 0
        return min(self._pool.num_shared(table.pages) * self.page_size, table.num_written)

    @property
    def state_counts(self) -> PageCounts | None:
        """Return how slots of recurrent states stand; None for models without any."""
        return self._states[0].pool.counts if self._states else None

    @property
    def residual_counts(self) -> PageCounts | None:
        """Return counts over all residual windows, or None if there are none."""
        if not self._residual:
            return None
        if len(self._residual) == 1:  # asked after every step, and there is mostly one
            return self._residual[0].counts
        return PageCounts(*map(sum, zip(*(pool.counts for pool in self._residual), strict=True)))

    # The life of a page table.

    def open(
        self,
        tokens: abc.Sequence[int],
        *,
        salt: bytes = b"",
        digests: list[Digest] | None = None,
        find: bool = True,
        media: tuple[MediaSpan, ...] = NO_MEDIA,
    ) -> PageTable:
        """Return a table with the longest cached prefix of ``tokens``, short of the last token.

        The last token is always left to compute: its logits are what a caller is after, and
        so the page being written is never one that somebody else may find.

        The table remembers the digests of these tokens: until ``rollback`` says otherwise, they
        are what it will be written with.

        digests   what an earlier table of the same tokens and salt knew: they are not computed again.
                  The table writes on in this very list, so that what it learns outlives it
        find      False: start empty; what is written will be found by others as ever
        media     images and the like among the tokens, by their positions
        """
        parts = tuple([GroupPageTable() for _ in self._groups])
        table = PageTable(self.page_size, salt, parts, media=media)
        for states in self._states:
            states.open(table)
        if digests is not None:
            table.digests = digests
        if self.prefix_cache:
            num_pages = max(len(tokens) - 1, 0) // self.page_size
            self._name(table.digests, tokens, num_pages, salt, media)
            if find and num_pages:
                digests = table.digests[:num_pages]
                found = self._prefixes.find(table, digests)
                table.parts = tuple([group.acquire(digests, found) for group in self._groups])
                table.num_written = table.capacity = len(table.pages) * self.page_size
        self._tables.add(table)
        return table

    def reserve(self, table: PageTable, num_tokens: int, *, ahead: int = 0) -> bool:
        """Make room for positions ``[0, num_tokens)``, and for the state of recurrent layers.

        Return False if a pool is short, and then nothing is taken. The slot of a state may wait for a copy
        then, see ``take_copies``.

        ahead   positions that will be written soon, ``max_chunk`` at most at a time: once this
                call succeeds, their room is certain. Layers without a window get all of it now.
        """
        if num_tokens <= table.capacity and ahead <= table.reserved_ahead:
            return True
        for states in self._states:
            if not states.has_room(table):
                return False
        before, table.reserved_ahead = table.reserved_ahead, max(table.reserved_ahead, ahead)
        for group in self._windowed:
            group.free_out_of_window(table)
        short: list[tuple[KVGroup, GroupPageTable, int]] = []  # of pages, and how many there should be
        for group, part in zip(self._groups, table.parts, strict=True):
            goal = group.spec.table_pages(table, num_tokens, max_chunk=self.max_chunk)
            missing = goal - len(part.pages)
            if missing <= 0:
                continue
            for states in self._states:
                states.make_room(group.pool, missing)
            if not group.pool.has_idle(missing):
                table.reserved_ahead = before
                return False
            short.append((group, part, goal))
        for group, part, goal in short:
            group.extend(part, goal)
        table.update_capacity()
        for states in self._states:
            states.start(table, self._copies.begin)
        return True

    @property
    def takes_snapshots(self) -> bool:
        """Whether ``plan_snapshots`` would do anything: asked once a step, and not for each of its rows."""
        return bool(self._states) and self.prefix_cache

    def plan_snapshots(self, table: PageTable, start: int, stop: int, *, num_known: int) -> None:
        """Decide which snapshots of recurrent state the next step takes: ``table.state.planned``.

        It computes positions [start, stop) of a table. ``num_known``: tokens of the sequence so far."""
        for states in self._states if self.prefix_cache else ():
            states.plan_snapshots(table, start, stop, num_known=num_known)

    def num_draftable(self, num_running: int) -> int | None:
        """Return how many drafts a step of so many sequences may have; None: any number.

        That is as far as it depends on slots for states."""
        return min([states.num_draftable(num_running) for states in self._states], default=None)

    def plan_drafts(self, table: PageTable, stop: int, count: int) -> None:
        """Prepare for ``count`` drafts behind position ``stop``, as ``num_draftable`` allows.

        The next ``commit`` says how many held, of several such steps if need be."""
        for states in self._states:
            states.plan_drafts(table, stop, count)

    def commit(self, table: PageTable, tokens: abc.Sequence[int], num_written: int) -> None:
        """Record that K/V of positions ``[0, num_written)`` is in memory; publish the pages it fills.

        A full page never changes again: whoever finds it may rely on it. Groups with a window give
        back what no later query sees, and take as many pages again where room was reserved ahead.
        """
        before, page_size = table.num_written, self.page_size
        assert before <= num_written <= table.capacity, "written where no page is reserved"
        table.num_written = num_written
        for states in self._states:
            states.accept(table)
        if num_written - before <= num_written % page_size:
            return  # no page is full now that was not: most rows of most steps
        first, last = before // page_size, num_written // page_size
        if self.prefix_cache:
            self._name(table.digests, tokens, last, table.salt, table.media)
            if first == 0:
                self.miss_reasons.first_page(self._contents(tokens, 0, 1, table.media)[0], table.salt)
            parent, digests = table.digests[first - 1] if first else None, table.digests[first:last]
            recording = self.page_index.recording
            contents = self._contents(tokens, first, last, table.media) if recording else []
            for group, part in zip(self._groups, table.parts, strict=True):
                wanted = group.spec.publishable_pages(page_size)
                if (count := min(last, wanted) - first) > 0:
                    pages = page_ids(part.pages[first : first + count])
                    watched = contents if group.index == 0 else ()
                    group.pool.publish(pages, digests[:count], parent, salt=table.salt, contents=watched)
            if contents:  # last: what the index has no room for is what is not cached
                self.page_index.add(digests, contents, parent, table.salt)
            for states in self._states:
                states.commit(table)
        for group in self._windowed:
            part = table.parts[group.index]
            group.free_out_of_window(table)
            goal = group.spec.table_pages(table, 0, max_chunk=self.max_chunk)
            if 0 < goal - len(part.pages) <= group.pool.num_idle:
                group.extend(part, goal)
                table.update_capacity()

    def fork(self, table: PageTable) -> PageTable | None:
        """Return a second table with the same written positions; None, and no change, if a pool is short.

        Full pages are shared. A partial one will be written by both sides, so the new table
        gets its own, filled by a copy that waits in ``take_copies``.
        """
        num_full, partial = divmod(table.num_written, self.page_size)
        if partial and not all(group.pool.num_idle for group in self._groups):
            return None
        if not all(states.pool.num_idle for states in self._states):
            return None
        parts = []
        for group, part in zip(self._groups, table.parts, strict=True):
            shared = group.share(part, num_full)
            parts.append(shared)
            if partial:
                group.extend(shared, num_full + 1)
                self._copies.begin(group, part.pages[num_full], shared.pages[num_full])
        forked = PageTable(
            self.page_size,
            table.salt,
            tuple(parts),
            digests=table.digests[:num_full],
            num_written=table.num_written,
            partings=table.partings,
            media=table.media,
        )
        for states in self._states:
            states.fork(table, forked, self._copies.begin)
        self._tables.add(forked)
        return forked

    def rollback(self, table: PageTable, num_tokens: int) -> None:
        """Forget everything past position ``num_tokens``, reserved pages included.

        A page that somebody else holds or can find is never written again. If the new end lies inside
        one, the table gets a private copy of it, which waits in ``take_copies``. If a pool has no page
        for that, the table ends at the last page boundary instead. If a window had moved on and its old
        pages cannot be found any more, the table ends where every group can go on, maybe at 0.
        ``table.num_written`` says where, and the rest is recomputed.
        """
        self._truncation.rollback(table, num_tokens)

    @property
    def has_copies(self) -> bool:
        """Whether ``take_copies`` would return any."""
        return bool(self._copies.waiting)

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Return the copies that open tables wait for: carry them out before their pages are used.

        ``reserve``, ``fork`` and ``rollback`` ask for copies. Report these with ``copied``."""
        return self._copies.take() if self._copies.waiting else ()

    def copied(self, copies: abc.Iterable[PageCopy]) -> None:
        """Release the pages of copies that ``take_copies`` returned and that have been carried out."""
        self._copies.release(copies)

    def close(self, table: PageTable) -> None:
        """Give every page back, tail first, so that a shared head outlives its tails.

        Copies that the table waits for are dropped."""
        self._tables.remove(table)
        if self._copies.waiting:
            self._copies.cancel(self.held_by(table))
        for group, part in zip(self._groups, table.parts, strict=True):
            group.trim(part, 0)
        table.update_capacity()
        for states in self._states:
            states.close(table)
        table.num_written = 0

    def insert(
        self,
        tokens: abc.Sequence[int],
        digests: abc.Sequence[Digest],
        first: int,
        fill: Fill,
        *,
        group: int = 0,
        salt: bytes = b"",
        media: tuple[MediaSpan, ...] = NO_MEDIA,
    ) -> int | None:
        """Cache the pages from ``first`` on of a sequence in one group, held by nobody.

        Their contents come from elsewhere: ``fill(indices, pages)`` puts them there. Return how many are new;
        None, and no change, if there is no room beside what is cached of the sequence, or, in a group without
        a window, if what comes before is not cached.

        tokens, digests   of all pages, the inserted ones last
        group             the number behind the last group: snapshots of recurrent state, each after one of
                          these pages, all of which must be cached
        """
        contents: list[bytes] = []
        known = first  # pages before those, which a window does not show, are part of their names
        if self.page_index.recording and group < len(self._groups):
            while known and digests[known - 1] not in self.page_index:
                known -= 1
            contents = self._contents(tokens, known, len(digests), media)
        watched = contents[first - known :] if group == 0 else []
        new = self._all[group].insert(digests, first, fill, salt=salt, contents=watched)
        if new is not None and contents:
            self.page_index.add(digests[known:], contents, digests[known - 1] if known else None, salt)
        if group == 0 and first == 0 and new:
            self.miss_reasons.first_page(self._contents(tokens, 0, 1, media)[0], salt)
        return new

    # What is cached, and what tables hold.

    def find(self, digest: Digest, group: int = 0) -> PageId | None:
        """Return a group's page with these contents, if it is cached now.

        Behind the groups: the slot of the state after it. Nothing is held."""
        return self._all[group].pool.lookup(digest)

    def num_findable(self, digests: abc.Sequence[Digest]) -> int:
        """Return after how many of these pages ``open`` would let a sequence go on."""
        return self._prefixes.longest(digests, len(digests))

    def needed_pages(self, num_pages: int, *, group: int) -> abc.Iterable[int]:
        """Yield the pages of a group without which a sequence cannot go on, last first.

        It would go on after ``num_pages`` full ones. Arithmetic alone: any thread may ask."""
        return self._all[group].spec.needed_pages(num_pages, self.page_size)

    def name_pages(
        self,
        tokens: abc.Sequence[int],
        digests: list[Digest],
        *,
        salt: bytes = b"",
        media: tuple[MediaSpan, ...] = NO_MEDIA,
    ) -> list[Digest]:
        """Make ``digests`` those of all pages that ``open`` would look for, computing what is missing."""
        num_pages = max(len(tokens) - 1, 0) // self.page_size
        self._name(digests, tokens, num_pages, salt, media)
        return digests

    def held_by(self, table: PageTable) -> list[tuple[int, PageId]]:
        """Return group and page of everything a table holds; slots of states are pages of the last group."""
        return [(group.index, page) for group in self._all for page in group.held(table)]

    def flush(self) -> int:
        """Forget the contents of every idle page of all groups; return how many there were."""
        num_idle = sum(group.pool.num_idle_cached for group in self._all)
        for group in self._all:
            group.pool.flush()
        return num_idle

    # What watchers and operators ask.

    @property
    def events(self) -> EventLog:
        """What could be found since when, in order."""
        return self._pool.events

    def keep_tokens(self) -> None:
        """From now on, for good, keep the tokens of pages that are published.

        They are in events and in ``page_index``. Costs time at every page."""
        self.events.keep_tokens()
        self.page_index.recording = True

    def cached_contents(self) -> dict[Digest, PageContents]:
        """Return what the pages that can be found hold, as far as their tokens are known."""
        return self.page_index.cached(self._pool.is_cached)

    def explain_miss(self, table: PageTable, tokens: abc.Sequence[int]) -> Miss:
        """Say why ``open`` with these tokens found what is in ``table`` and no more; before ``commit``."""
        return self.miss_reasons.explain(table, tokens) if self.prefix_cache else Miss(0, "disabled")

    def check(self) -> None:
        """Raise AssertionError if a rule of README.md is broken; slow, for tests."""
        pending = self._copies.pending
        check_books(self._groups, self.page_size, self._tables, pending)
        held = {each for table in self._tables for each in self.held_by(table)}
        for copy in self._copies.waiting:
            assert (copy.group, copy.target) in held, f"{copy} waits for a table that is closed"
        for states in self._states:
            states.check(self._tables, [copy for copy in pending if copy.group == states.index])

    def _name(
        self,
        digests: list[Digest],
        tokens: abc.Sequence[int],
        num_pages: int,
        salt: bytes,
        media: tuple[MediaSpan, ...],
    ) -> None:
        """Make ``digests`` those of the first ``num_pages`` pages, computing what is missing."""
        size = self.page_size
        extend_chain(digests, tokens, num_pages, salt=salt, page_size=size, hasher=self._hasher, media=media)

    def _contents(
        self, tokens: abc.Sequence[int], first: int, last: int, media: tuple[MediaSpan, ...]
    ) -> list[bytes]:
        """Return what pages ``[first, last)`` are named by, their parent aside."""
        return page_contents(tokens, first, last, page_size=self.page_size, media=media)
