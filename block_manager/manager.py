"""Page tables: which page holds which position of which sequence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens

from octavo.block_manager.digests import TOKEN_BYTES, Hasher, check_strength, pack, root, sha256_chain, split
from octavo.block_manager.events import EventLog
from octavo.block_manager.group import Fill, Group
from octavo.block_manager.groups import Groups
from octavo.block_manager.misses import Miss, Misses
from octavo.block_manager.policies import DEFAULT_POLICY
from octavo.block_manager.types import Digest, Fork, PageCopy, PageCounts, PageGroup, PageId, PageTable


class BlockManager:
    """Gives sequences pages of fixed pools and lets them share what they have in common.

    groups         size of the one pool that all layers share; or a ``PageGroup`` for each kind of
                   layer. The first one is what "pages" means where nothing else is said; let it
                   be the one without a window, if there is any
    page_size      positions per page
    hasher         names the contents of pages; see digests.py
    prefix_cache   False: nothing is published and every ``open`` starts empty
    policy         which idle page goes next, by its name in ``POLICIES``
    max_pinned     pages of each pool that ``Pins`` may hold; sequences are not let in on them
    max_chunk      positions of one sequence that are written at a time, at most: how far beyond
                   its window a group needs pages
    quantize_after  of tables that are opened without a number of their own
    clock          seconds, for saying when a page was evicted

    misses         says why a page was not found

    Who may hold, write and free a page, and when: README.md in this folder.
    """

    def __init__(
        self,
        groups: int | Tokens[PageGroup],
        page_size: int,
        *,
        hasher: Hasher = sha256_chain,
        prefix_cache: bool = True,
        policy: str = DEFAULT_POLICY,
        max_pinned: int = 0,
        max_chunk: int = 512,
        quantize_after: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}; 32 is a good start")
        specs = (PageGroup(num_pages=groups),) if isinstance(groups, int) else tuple(groups)
        smallest = min(spec.num_pages for spec in specs)
        if not 0 <= max_pinned < smallest:
            raise ValueError(
                f"max_pinned must be at least 0 and less than the {smallest} pages of the pool, "
                f"got {max_pinned}; sequences need room, too"
            )
        if prefix_cache:
            check_strength(hasher)
        self.page_size = page_size
        self.max_pinned = max_pinned
        self.policy = policy
        self.prefix_cache = prefix_cache
        self.quantize_after = quantize_after
        self._groups = Groups(specs, page_size, max_chunk=max_chunk, policy=policy, clock=clock)
        self._pool = self._groups[0].pool
        self._hasher = hasher
        self._tables: set[PageTable] = set()
        self.misses = Misses(page_size, specs[0].num_pages, evicted=self._groups.eviction)
        self._copies: list[PageCopy] = []  # handed out and not yet carried out

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def capacity(self) -> int:
        """Positions that one sequence can have, whatever is pinned."""
        return self.capacity_with(self.quantize_after)

    def capacity_with(self, quantize_after: int) -> int:
        """The same for sequences that are quantized after so many tokens."""
        max_chunk, max_pinned = self._groups.max_chunk, self.max_pinned
        return min(group.capacity(max_chunk, max_pinned, quantize_after) for group in self._groups)

    @property
    def max_chunk(self) -> int:
        """Positions of one sequence that may be written at a time."""
        return self._groups.max_chunk

    @property
    def groups(self) -> tuple[PageGroup, ...]:
        return tuple(group.spec for group in self._groups)

    def idle_pages(self) -> tuple[int, ...]:
        """``num_idle`` of every group."""
        return self._groups.idle_pages()

    def held_by(self, table: PageTable) -> list[tuple[int, PageId]]:
        """Group and page of everything a table holds."""
        return self._groups.held(table)

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
    def twin_counts(self) -> PageCounts | None:
        """Of 16-bit twins, in all groups that are some; None without any."""
        return self._groups.twin_counts()

    @property
    def num_evicted(self) -> int:
        """Cached pages of all groups that were given to somebody else, since the start."""
        return sum(group.pool.num_evicted for group in self._groups)

    @property
    def events(self) -> EventLog:
        """What could be found since when, in order: pages of the first group."""
        return self._pool.events

    def open(
        self,
        tokens: Tokens[int],
        *,
        salt: bytes = b"",
        digests: list[Digest] | None = None,
        find: bool = True,
        quantize_after: int | None = None,
    ) -> PageTable:
        """A table with the longest cached prefix of ``tokens``, short of the last token.

        The last token is always left to compute: its logits are what a caller is after, and
        so the page being written is never one that somebody else may find.

        The table remembers the digests of these tokens: until ``rollback`` says otherwise, they
        are what it will be written with.

        digests   what an earlier table of the same tokens and salt knew (its ``digests``):
                  they are not computed again; the new table takes the list over
        find      False: start empty; what is written will be found by others as ever
        quantize_after   the table's own (None: the manager's). It changes what queries read, and so
                  what they compute: tables of another number need another salt
        """
        after = self.quantize_after if quantize_after is None else quantize_after
        table = self._groups.new_table(salt, after)
        if digests is not None:
            table.digests = digests
        if self.prefix_cache:
            num_pages = max(len(tokens) - 1, 0) // self.page_size
            self._extend_digests(table, tokens, num_pages)
            if find:
                self._groups.find(table, table.digests[:num_pages])
        self._tables.add(table)
        return table

    def find(self, digest: Digest, group: int = 0) -> PageId | None:
        """A group's page with these contents, if it can be found now. Nothing is held."""
        return self._groups[group].pool.find(digest)

    def num_findable(self, digests: Tokens[Digest], *, quantize_after: int | None = None) -> int:
        """After how many of these pages ``open`` would let a sequence go on."""
        after = self.quantize_after if quantize_after is None else quantize_after
        return self._groups.num_findable(digests, after)

    def needed_pages(self, num_pages: int, *, group: int, quantize_after: int | None = None) -> Iterable[int]:
        """The pages of a group without which a sequence cannot go on after ``num_pages`` full ones, last
        first. Arithmetic alone: any thread may ask."""
        after = self.quantize_after if quantize_after is None else quantize_after
        return self._groups[group].needed(num_pages, after)

    def held_indices(self, table: PageTable, group: int) -> list[int]:
        """Which of a sequence's pages its table holds in a group, rising."""
        return self._groups[group].live_indices(table.parts[group])

    def adopt(
        self,
        tokens: Tokens[int],
        digests: Tokens[Digest],
        first: int,
        fill: Fill,
        *,
        group: int = 0,
        salt: bytes = b"",
    ) -> int | None:
        """Let the pages from ``first`` on of a sequence be found in one group, held by nobody, with contents
        that came from elsewhere: ``fill(indices, pages)`` puts them there. How many are new; None, and
        no change, if there is no room beside what can be found of the sequence, or, in a group
        without a window, if what comes before cannot be.

        tokens, digests   of all pages, the adopted ones last
        """
        contents: list[bytes] = []
        if group == 0 and self.events.tokens_since is not None:
            contents = split(pack(tokens[first * self.page_size :]), self.page_size)
        new = self._groups[group].adopt(digests, first, fill, salt=salt, contents=contents)
        if group == 0 and first == 0 and new:
            self.misses.first_page(tokens, salt)
        return new

    def name_pages(self, tokens: Tokens[int], digests: list[Digest], *, salt: bytes = b"") -> list[Digest]:
        """Make ``digests`` those of all pages that ``open`` would look for, computing what is missing."""
        table = PageTable(self.page_size, salt, digests=digests)
        self._extend_digests(table, tokens, max(len(tokens) - 1, 0) // self.page_size)
        return digests

    def explain_miss(self, table: PageTable, tokens: Tokens[int]) -> Miss:
        """Why ``open`` with these tokens found what is in ``table`` and no more; before ``commit``."""
        return self.misses.explain(table, tokens) if self.prefix_cache else Miss(0, "disabled")

    def count_misses(self, num_tokens: int, miss: Miss) -> dict[str, int]:
        """Tokens of a prompt that were not found, by reason."""
        return self.misses.count(num_tokens, miss)

    def would_overflow(self, table: PageTable, num_tokens: int) -> bool:
        """Whether writing positions ``[0, num_tokens)`` needs pages that are not yet reserved."""
        return num_tokens > table.capacity

    def reserve(self, table: PageTable, num_tokens: int, *, ahead: int = 0) -> bool:
        """Make room for positions ``[0, num_tokens)``; False if a pool is short, and then nothing is
        taken.

        ahead   positions that will be written soon, ``max_chunk`` at most at a time: once this
                call succeeds, their room is certain. Layers without a window get all of it now.
        """
        if num_tokens <= table.capacity and ahead <= table.promised:
            return True
        promised, table.promised = table.promised, max(table.promised, ahead)
        if not self._groups.reserve(table, num_tokens):
            table.promised = promised
            return False
        return True

    def commit(self, table: PageTable, tokens: Tokens[int], num_written: int) -> None:
        """Record that K/V of positions ``[0, num_written)`` is in memory; publish the pages it fills.

        A full page never changes again: whoever finds it may rely on it. Groups with a window give
        back what no later query sees.
        """
        first, last = table.num_written // self.page_size, num_written // self.page_size
        assert table.num_written <= num_written <= table.capacity, "written where no page is reserved"
        table.num_written = num_written
        if first == last:
            return
        if self.prefix_cache:
            self._publish(table, tokens, first, last)
        self._groups.slide(table)

    def _publish(self, table: PageTable, tokens: Tokens[int], first: int, last: int) -> None:
        """Let pages ``[first, last)``, which have become full, be found."""
        self._extend_digests(table, tokens, last)
        if first == 0:
            self.misses.first_page(tokens, table.salt)
        contents: list[bytes] = []
        if self.events.tokens_since is not None:
            contents = split(pack(tokens[first * self.page_size : last * self.page_size]), self.page_size)
        self._groups.publish(table, first, last, contents)

    def fork(self, table: PageTable) -> Fork | None:
        """A second table with the same written positions; None, and no change, if a pool is short.

        Full pages are shared. A partial one will be written by both sides, so the new table
        gets its own, filled by the copy: carry it out, then say so with ``copied``.
        """
        num_full, partial = divmod(table.num_written, self.page_size)
        if partial and not all(self.idle_pages()):
            return None
        parts, copies = self._groups.share(table, num_full), []
        for group, part, shared in zip(self._groups, table.parts, parts, strict=True):
            if partial:
                group.extend(shared, num_full + 1)
                copies.append(self._copy(group, part.pages[num_full], shared.pages[num_full]))
        forked = PageTable(
            self.page_size,
            table.salt,
            parts,
            digests=table.digests[:num_full],
            num_written=table.num_written,
            quantize_after=table.quantize_after,
        )
        self._tables.add(forked)
        return Fork(forked, tuple(copies))

    def rollback(self, table: PageTable, num_tokens: int) -> tuple[PageCopy, ...]:
        """Forget everything past position ``num_tokens``, reserved pages included.

        A page that somebody else holds or can find is never written again. If the new end
        lies inside one, the table gets a private copy of it: carry out the returned copies, then
        say so with ``copied``. If a pool has no page for that, the table ends at the last
        page boundary instead. If a window had moved on and its old pages cannot be found any more,
        the table ends where every group can go on, maybe at 0. ``table.num_written`` says where,
        and the rest is recomputed.
        """
        assert 0 <= num_tokens <= table.num_written, f"cannot roll back to {num_tokens}"
        num_full, partial = divmod(num_tokens, self.page_size)
        table.promised = 0
        if self._groups.has_slid(table, num_tokens):
            self._groups.end_at(table, num_full)
            return ()
        self._groups.trim(table, num_full + (partial > 0))
        del table.digests[num_full:]
        table.num_written = num_tokens
        return self._own_partial_page(table, num_full) if partial else ()

    def _own_partial_page(self, table: PageTable, index: int) -> tuple[PageCopy, ...]:
        """Replace page ``index`` in the groups where others hold or find it."""
        foreign = [
            (group, part)
            for group, part in zip(self._groups, table.parts, strict=True)
            if not group.pool.is_private(PageId(part.pages[index]))
        ]
        if not all(group.pool.num_idle for group, _ in foreign):
            self._groups.end_at(table, index)
            return ()
        copies: list[PageCopy] = []
        for group, part in foreign:
            page = PageId(part.pages.pop())
            group.extend(part, index + 1)
            copies.append(self._copy(group, page, part.pages[index]))
            group.pool.drop([page])
        return tuple(copies)

    def copied(self, copies: Iterable[PageCopy]) -> None:
        """These copies have been carried out, or nobody wants them any more: release their pages."""
        for copy in copies:
            self._copies.remove(copy)
            self._groups[copy.group].pool.drop([copy.target, copy.source])

    def close(self, table: PageTable) -> None:
        """Give every page back, tail first, so that a shared head outlives its tails."""
        self._tables.remove(table)
        self._groups.trim(table, 0)
        table.num_written = 0

    def flush(self) -> int:
        """Forget the contents of every idle page of all groups; returns how many there were."""
        return self._groups.flush()

    def check(self) -> None:
        """Raise AssertionError if a rule of README.md is broken; slow, for tests."""
        self._groups.check(self._tables, self._copies)

    def _extend_digests(self, table: PageTable, tokens: Tokens[int], num_pages: int) -> None:
        """Make the digests of the first ``num_pages`` pages known, hashing only the new ones."""
        digests, page_size = table.digests, self.page_size
        if len(digests) >= num_pages:
            return
        parent = digests[-1] if digests else root(table.salt)
        packed = pack(tokens[len(digests) * page_size : num_pages * page_size])
        digests += self._hasher(parent, packed, page_size * TOKEN_BYTES)
        assert len(digests) == num_pages, f"{len(digests)} digests for {num_pages} pages"

    def _copy(self, group: Group, source: int, target: int) -> PageCopy:
        copy = PageCopy(PageId(source), PageId(target), group.index)
        assert all((source, group.index) != (other.target, other.group) for other in self._copies), (
            f"page {source} is not filled yet"
        )
        group.pool.hold((copy.source, copy.target))
        self._copies.append(copy)
        return copy
