from __future__ import annotations

import time
from collections import abc

from .cache_group import CacheGroup, Fill
from .digests import NO_MEDIA, extend_chain, page_contents
from .events import EventLog
from .invariants import check_ref_counts
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
    """Gives pages to sequences and shares pages of common prefixes.

    A page table covers equal positions in every group of layers. An operation changes all groups or none.

    groups           number of pages, or one specification per group of layers; a group without a
                     window comes first
    prefix_cache     False: no page is shared between requests
    max_pinned       pages of each pool that pins may hold
    max_chunk        most positions of one sequence that a step writes
    states           slots of recurrent layers; None for models without any

    README.md in this folder says which table may hold, write and free a page.
    """

    def __init__(
        self,
        groups: int | abc.Sequence[KVGroupSpec],
        page_size: int,
        *,
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
                f"max_pinned must be at least 0 and less than the {smallest} pages of the pool, got "
                f"{max_pinned}; sequences need pages, too"
            )
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.policy = policy
        self.max_pinned = max_pinned
        self.max_chunk = max_chunk
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
        self.groups = specs
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

    @property
    def parts(self) -> tuple[KVGroupSpec | RecurrentState, ...]:
        return tuple(group.spec for group in self._all)

    @property
    def capacity(self) -> int:
        """Largest number of positions of one sequence while ``max_pinned`` pages are pinned."""
        return min(
            group.spec.max_positions(self.page_size, max_chunk=self.max_chunk, num_pinned=self.max_pinned)
            for group in self._groups
        )

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def counts(self) -> PageCounts:
        """Return the numbers of held, idle cached and idle empty pages of the first group."""
        return self._pool.counts

    @property
    def num_idle(self) -> int:
        """Number of pages that can be allocated: empty pages and idle cached pages."""
        return self._pool.num_idle

    @property
    def num_evicted(self) -> int:
        return sum([group.pool.num_evicted for group in self._groups])

    def idle_pages(self) -> tuple[int, ...]:
        """Return the number of idle pages of each group, then of idle recurrent slots, if any."""
        return tuple([group.pool.num_idle for group in self._all])

    def growth(self, table: PageTable, num_tokens: int) -> tuple[int, ...]:
        """Return, for each group, how many more pages a table needs for ``num_tokens`` positions."""
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
        """Return how many positions at the table's start are on pages shared with other tables."""
        if self._groups[0].spec.window is not None:
            return 0
        return min(self._pool.num_shared(table.pages) * self.page_size, table.num_written)

    @property
    def state_counts(self) -> PageCounts | None:
        """Return the numbers of held, cached and empty recurrent slots; None without recurrent layers."""
        return self._states[0].pool.counts if self._states else None

    @property
    def residual_counts(self) -> PageCounts | None:
        if not self._residual:
            return None
        if len(self._residual) == 1:
            return self._residual[0].counts
        return PageCounts(*map(sum, zip(*(pool.counts for pool in self._residual), strict=True)))

    def open(
        self,
        tokens: abc.Sequence[int],
        *,
        salt: bytes = b"",
        digests: list[Digest] | None = None,
        find: bool = True,
        media: tuple[MediaSpan, ...] = NO_MEDIA,
    ) -> PageTable:
        """Return a table that holds the longest cached prefix of ``tokens``, without the last token.

        The last token is always computed, because sampling needs its logits. Until ``rollback``, the caller
        must write exactly these tokens.

        digests   known digests of these tokens and salt; ``open`` appends missing digests to the list
        find      False: start with an empty table
        """
        parts = tuple([GroupPageTable() for _ in self._groups])
        table = PageTable(self.page_size, salt, parts, media=media)
        for states in self._states:
            states.open(table)
        if digests is not None:
            table.digests = digests
        if self.prefix_cache:
            num_pages = max(len(tokens) - 1, 0) // self.page_size
            self._digests_of(table.digests, tokens, num_pages, salt, media)
            if find and num_pages:
                digests = table.digests[:num_pages]
                found = self._prefixes.find(table, digests)
                table.parts = tuple([group.acquire(digests, found) for group in self._groups])
                table.num_written = table.capacity = len(table.pages) * self.page_size
        self._tables.add(table)
        return table

    def reserve(self, table: PageTable, num_tokens: int, *, ahead: int = 0) -> bool:
        """Reserve pages for positions ``[0, num_tokens)``; return False if too few pages are idle.

        After False nothing is reserved.

        ahead   positions of later steps, at most ``max_chunk`` per step; their pages are guaranteed, too
        """
        if num_tokens <= table.capacity and ahead <= table.reserved_ahead:
            return True
        for states in self._states:
            if not states.has_slot(table):
                return False
        before, table.reserved_ahead = table.reserved_ahead, max(table.reserved_ahead, ahead)
        for group in self._windowed:
            group.free_out_of_window(table)
        short: list[tuple[KVGroup, GroupPageTable, int]] = []
        for group, part in zip(self._groups, table.parts, strict=True):
            goal = group.spec.table_pages(table, num_tokens, max_chunk=self.max_chunk)
            missing = goal - len(part.pages)
            if missing <= 0:
                continue
            for states in self._states:
                states.evict_for(group.pool, missing)
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
        return bool(self._states) and self.prefix_cache

    def plan_snapshots(self, table: PageTable, start: int, stop: int, *, num_known: int) -> None:
        """Allocate slots for the snapshots of recurrent state that the next step takes.

        The step computes positions ``[start, stop)``. The sequence has ``num_known`` tokens so far.
        """
        for states in self._states if self.prefix_cache else ():
            states.plan_snapshots(table, start, stop, num_known=num_known)

    def num_draftable(self, num_running: int) -> int | None:
        """Return how many draft tokens ``num_running`` sequences may have in a step; None: no limit.

        Only recurrent layers limit drafts, because each draft needs a state slot.
        """
        return min([states.num_draftable(num_running) for states in self._states], default=None)

    def plan_drafts(self, table: PageTable, stop: int, count: int) -> None:
        """Allocate state slots for ``count`` draft tokens after position ``stop``."""
        for states in self._states:
            states.plan_drafts(table, stop, count)

    def commit(self, table: PageTable, tokens: abc.Sequence[int], num_written: int) -> None:
        """Record that K/V of positions ``[0, num_written)`` is written; publish full pages.

        Other sequences may share a published page. Groups with a window release pages behind the window.
        """
        before, page_size = table.num_written, self.page_size
        assert before <= num_written <= table.capacity, "written where no page is reserved"
        table.num_written = num_written
        for states in self._states:
            states.accept(table)
        if num_written - before <= num_written % page_size:
            return
        first, last = before // page_size, num_written // page_size
        if self.prefix_cache:
            self._digests_of(table.digests, tokens, last, table.salt, table.media)
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
            if contents:
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
        """Return a second table with the written positions of ``table``; None if no page is idle.

        Both tables share the full pages. A copy of the last, partly written page waits in ``take_copies``.
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
            branch_points=table.branch_points,
            media=table.media,
        )
        for states in self._states:
            states.fork(table, forked, self._copies.begin)
        self._tables.add(forked)
        return forked

    def rollback(self, table: PageTable, num_tokens: int) -> None:
        """Cut a table to its first ``num_tokens`` positions or fewer, and release reserved pages.

        A cached or shared page is never written again. If the new end lies inside such a page, the table
        gets a private copy, or ends at the page's start. Read the result from ``table.num_written``.
        """
        self._truncation.rollback(table, num_tokens)

    @property
    def has_copies(self) -> bool:
        return bool(self._copies.waiting)

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Return the page copies that the next step must make before it writes.

        ``reserve``, ``fork`` and ``rollback`` request copies. Report finished copies to ``copied``.
        """
        return self._copies.take() if self._copies.waiting else ()

    def copied(self, copies: abc.Iterable[PageCopy]) -> None:
        self._copies.release(copies)

    def close(self, table: PageTable) -> None:
        """Release every page of a table, the last page first.

        So the shared first pages are evicted last.
        """
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
        """Put pages of a sequence into the cache of one group; no table holds them.

        Return the number of pages that were not cached yet. Return None, and change nothing, if too few
        pages are idle or an earlier page that is needed is not cached.

        fill              function (indices, pages) that writes the contents of the pages
        group             index of the group; ``len(groups)`` inserts snapshots of recurrent state
        """
        contents: list[bytes] = []
        known = first
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

    def find(self, digest: Digest, group: int = 0) -> PageId | None:
        """Return a group's cached page with this digest, or None; the page gets no holder."""
        return self._all[group].pool.lookup(digest)

    def num_findable(self, digests: abc.Sequence[Digest]) -> int:
        """Return how many of these pages ``open`` would find."""
        return self._prefixes.longest(digests, len(digests))

    def needed_pages(self, num_pages: int, *, group: int) -> abc.Iterable[int]:
        """Yield the indices of the pages that a sequence needs to continue after ``num_pages``, last first.

        Any thread may call this method.
        """
        return self._all[group].spec.needed_pages(num_pages, self.page_size)

    def page_digests(
        self,
        tokens: abc.Sequence[int],
        digests: list[Digest],
        *,
        salt: bytes = b"",
        media: tuple[MediaSpan, ...] = NO_MEDIA,
    ) -> list[Digest]:
        num_pages = max(len(tokens) - 1, 0) // self.page_size
        self._digests_of(digests, tokens, num_pages, salt, media)
        return digests

    def held_by(self, table: PageTable) -> list[tuple[int, PageId]]:
        return [(group.index, page) for group in self._all for page in group.held_pages(table)]

    def flush(self) -> int:
        """Empty every idle page; return the number of pages that were cached."""
        num_idle = sum(group.pool.num_idle_cached for group in self._all)
        for group in self._all:
            group.pool.flush()
        return num_idle

    @property
    def events(self) -> EventLog:
        return self._pool.events

    def keep_tokens(self) -> None:
        """Keep the tokens of pages that are published from now on, at some cost per page."""
        self.events.keep_tokens()
        self.page_index.recording = True

    def cached_contents(self) -> dict[Digest, PageContents]:
        return self.page_index.cached(self._pool.is_cached)

    def explain_miss(self, table: PageTable, tokens: abc.Sequence[int]) -> Miss:
        """Return why ``open`` found no more cached pages for these tokens; call it before ``commit``."""
        return self.miss_reasons.explain(table, tokens) if self.prefix_cache else Miss(0, "disabled")

    def check(self) -> None:
        """Raise AssertionError if a rule of README.md is broken; slow, for tests."""
        pending = self._copies.pending
        check_ref_counts(self._groups, self.page_size, self._tables, pending)
        held = {each for table in self._tables for each in self.held_by(table)}
        for copy in self._copies.waiting:
            assert (copy.group, copy.target) in held, f"{copy} waits for a table that is closed"
        for states in self._states:
            states.check(self._tables, [copy for copy in pending if copy.group == states.index])

    def _digests_of(
        self,
        digests: list[Digest],
        tokens: abc.Sequence[int],
        num_pages: int,
        salt: bytes,
        media: tuple[MediaSpan, ...],
    ) -> None:
        size = self.page_size
        extend_chain(digests, tokens, num_pages, salt=salt, page_size=size, media=media)

    def _contents(
        self, tokens: abc.Sequence[int], first: int, last: int, media: tuple[MediaSpan, ...]
    ) -> list[bytes]:
        return page_contents(tokens, first, last, page_size=self.page_size, media=media)
