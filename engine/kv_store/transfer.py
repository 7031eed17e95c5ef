"""Pages out of the pool and into it, on the engine's thread, and what is known of those that are there."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Run
from dataclasses import dataclass
from typing import Protocol

from octavo.block_manager import BlockManager, Digest, PageChain, PageId, PageTable
from octavo.block_manager.digests import root
from octavo.kernels.page_bytes import PageBytes

from ..api.errors import NotConfigured
from .page_runs import PageKind, PagePart, PageRun


class PageAccess(Protocol):
    """A model's pools, as bytes. Called from the engine's thread, between steps."""

    @property
    def page_kind(self) -> PageKind: ...

    def read_pages(self, pages: Run[int], group: int) -> PageBytes: ...

    def write_pages(self, pages: Run[int], data: PageBytes, group: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Inserted:
    """Pages that can be found now and could not before, those that could, and those there was no room for."""

    num_new: int
    num_known: int
    num_skipped: int


class PageTransfer:
    """Reads and inserts pages of a core's pool.

    remember   keep the tokens of published pages, so that ``chains`` can tell them all
    """

    def __init__(self, access: PageAccess, blocks: BlockManager, *, remember: bool = False) -> None:
        self._access = access
        self._blocks = blocks
        if remember:
            blocks.keep_tokens()

    @property
    def page_size(self) -> int:
        return self._blocks.page_size

    @property
    def kind(self) -> PageKind:
        """NotConfigured without a prefix cache."""
        self.check()
        return self._access.page_kind

    def check(self) -> None:
        """NotConfigured without a prefix cache."""
        if not self._blocks.prefix_cache:
            raise NotConfigured("the prefix cache is off, so no page is found; leave --no-prefix-cache out")

    def open(self, tokens: Run[int], salt: bytes) -> PageTable:
        """Hold the cached full pages of these tokens; ``close`` lets them go."""
        self.check()
        return self._blocks.open([*tokens, 0], salt=salt)

    def close(self, table: PageTable) -> None:
        self._blocks.close(table)

    def read_held(self, table: PageTable, tokens: Run[int], first: int, limit: int) -> PageRun:
        """What a table that ``open`` made for these tokens holds of pages ``first``, ..., at most so many."""
        stop, parts = min(len(table.pages), first + limit), []
        for group, part in enumerate(table.parts):
            held = [i for i in self._blocks.held_indices(table, group) if first <= i < stop]
            parts.append(self._part(group, first, {index: part.pages[index] for index in held}))
        return self._run(tokens, table.digests, table.salt, first, stop, parts)

    def read_cached(self, chain: PageChain) -> PageRun:
        """What can be found of a chain's pages, in any group."""
        blocks = self._blocks
        digests = blocks.name_pages([*chain.tokens, 0], [], salt=chain.salt)
        parts = []
        for group in range(len(blocks.groups)):
            found = {i: blocks.find(digests[i], group) for i in range(chain.first, chain.stop)}
            pages = {index: page for index, page in found.items() if page is not None}
            parts.append(self._part(group, chain.first, pages))
        return self._run(chain.tokens, digests, chain.salt, chain.first, chain.stop, parts)

    def _part(self, group: int, first: int, pages: Mapping[int, int]) -> PagePart:
        data = self._access.read_pages(list(pages.values()), group)
        return PagePart(tuple(index - first for index in pages), data)

    def _run(
        self,
        tokens: Run[int],
        digests: Run[Digest],
        salt: bytes,
        first: int,
        stop: int,
        parts: list[PagePart],
    ) -> PageRun:
        size = self._blocks.page_size
        parent = digests[first - 1] if first else root(salt)
        return PageRun(self.kind, parent, tuple(tokens[first * size : stop * size]), tuple(parts), salt)

    def insert(
        self,
        tokens: Run[int],
        pages: PageBytes,
        salt: bytes,
        *,
        first: int,
        group: int = 0,
        digests: list[Digest] | None = None,
    ) -> Inserted:
        """Put pages ``first``, ``first + 1``, ... of a sequence, of this pool's kind, where they are cached
        and held by nobody. All or none: they need room and, in a group without a window, the pages
        before them.

        digests   of the sequence's pages up to the last of these, if they are known
        """
        blocks, count = self._blocks, len(pages)
        end = first + count
        tokens = tokens[: end * blocks.page_size]
        named = blocks.name_pages([*tokens, 0], [] if digests is None else digests, salt=salt)

        def fill(indices: list[int], targets: list[PageId]) -> None:
            self._access.write_pages(targets, pages[[index - first for index in indices]], group)

        new = blocks.insert(tokens, named, first, fill, group=group, salt=salt)
        if new is None:
            return Inserted(0, 0, count)
        return Inserted(new, count - new, 0)

    def chains(self, max_pages: int) -> list[PageChain]:
        """All pages that are remembered and that some group has, each once, and those that lead to
        them, those before others first."""
        return self._blocks.page_index.chains(max_pages)
