"""Page tables: which page holds which position of which sequence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens

from .copies import Copies
from .digests import (
    Hasher,
    check_strength,
    extend_chain,
    pack,
    sha256_chain,
    split,
)
from .group import Fill
from .groups import Groups
from .misses import Miss, Misses
from .policies import DEFAULT_POLICY
from .pools import Pools
from .types import Digest, Fork, PageCopy, PageGroup, PageId, PageTable


class BlockManager(Pools):
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
        if prefix_cache:
            check_strength(hasher)
        all_groups = Groups(specs, page_size, max_chunk=max_chunk, policy=policy, clock=clock)
        super().__init__(all_groups, max_pinned=max_pinned, quantize_after=quantize_after)
        self.page_size = page_size
        self.policy = policy
        self.prefix_cache = prefix_cache
        self._hasher = hasher
        self._tables: set[PageTable] = set()
        self.misses = Misses(page_size, specs[0].num_pages, evicted=self._groups.eviction)
        self._copies = Copies(self._groups, page_size)

    def held_by(self, table: PageTable) -> list[tuple[int, PageId]]:
        """Group and page of everything a table holds."""
        return self._groups.held(table)

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
            self._name(table, tokens, num_pages)
            if find:
                self._groups.find(table, table.digests[:num_pages])
        self._tables.add(table)
        return table

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
        num_pages = max(len(tokens) - 1, 0) // self.page_size
        extend_chain(digests, tokens, num_pages, salt=salt, page_size=self.page_size, hasher=self._hasher)
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
        self._name(table, tokens, last)
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
        fork = self._copies.fork(table)
        if fork is not None:
            self._tables.add(fork.table)
        return fork

    def rollback(self, table: PageTable, num_tokens: int) -> tuple[PageCopy, ...]:
        """Forget everything past position ``num_tokens``, reserved pages included.

        A page that somebody else holds or can find is never written again. If the new end
        lies inside one, the table gets a private copy of it: carry out the returned copies, then
        say so with ``copied``. If a pool has no page for that, the table ends at the last
        page boundary instead. If a window had moved on and its old pages cannot be found any more,
        the table ends where every group can go on, maybe at 0. ``table.num_written`` says where,
        and the rest is recomputed.
        """
        return self._copies.rollback(table, num_tokens)

    def copied(self, copies: Iterable[PageCopy]) -> None:
        """These copies have been carried out, or nobody wants them any more: release their pages."""
        self._copies.done(copies)

    def close(self, table: PageTable) -> None:
        """Give every page back, tail first, so that a shared head outlives its tails."""
        self._tables.remove(table)
        self._groups.trim(table, 0)
        table.num_written = 0

    def check(self) -> None:
        """Raise AssertionError if a rule of README.md is broken; slow, for tests."""
        self._groups.check(self._tables, self._copies.pending)

    def _name(self, table: PageTable, tokens: Tokens[int], num_pages: int) -> None:
        """Make the digests of the first ``num_pages`` pages known."""
        if len(table.digests) < num_pages:
            extend_chain(
                table.digests,
                tokens,
                num_pages,
                salt=table.salt,
                page_size=self.page_size,
                hasher=self._hasher,
            )
