"""Pages out of the pool and into it, on the engine's thread, and what is known of those that are there."""

from __future__ import annotations

from collections.abc import Sequence as Run
from dataclasses import dataclass
from typing import Protocol

from octavo.block_manager import BlockManager, Digest
from octavo.block_manager.digests import root
from octavo.engine.errors import NotConfigured
from octavo.engine.store.page_files import PageKind, PageRun
from octavo.kernels.page_bytes import PageBytes
from octavo.scheduler import Sequence, Step


class PageAccess(Protocol):
    """A model's pool, as bytes. Called from the engine's thread, between steps."""

    @property
    def page_kind(self) -> PageKind: ...

    def read_pages(self, pages: Run[int]) -> PageBytes: ...

    def write_pages(self, pages: Run[int], data: PageBytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Inserted:
    """Pages that can be found now and could not before, those that could, and those there was no room for."""

    num_new: int
    num_known: int
    num_skipped: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Pages ``[first, stop)`` of a sequence; nobody else begins with the pages after ``first``."""

    tokens: list[int]
    salt: bytes
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a digest stands for: the page's tokens, behind those of its parent (None: at the start)."""

    parent: Digest | None
    tokens: tuple[int, ...]
    salt: bytes


class PageTransfer:
    """Reads and inserts pages of a core's pool.

    remember   keep the tokens of published pages, so that ``chains`` can tell them all
    """

    def __init__(self, access: PageAccess, blocks: BlockManager, *, remember: bool = False) -> None:
        self._access = access
        self._blocks = blocks
        self._remember = remember
        self._entries: dict[Digest, _Entry] = {}

    @property
    def kind(self) -> PageKind:
        """NotConfigured if pages of this model cannot leave the pool."""
        self.check()
        return self._access.page_kind

    def check(self) -> None:
        """NotConfigured if pages of this model cannot leave the pool."""
        groups = self._blocks.groups
        if not self._blocks.prefix_cache:
            raise NotConfigured("the prefix cache is off, so no page is found; leave --no-prefix-cache out")
        if len(groups) > 1 or groups[0].window is not None:
            raise NotConfigured("pages of layers with a window cannot be written to files yet")

    def read(self, tokens: Run[int], salt: bytes, *, first: int = 0, limit: int | None = None) -> PageRun:
        """The cached full pages of these tokens from page ``first`` on, at most ``limit``; maybe none."""
        kind, blocks = self.kind, self._blocks
        size = blocks.page_size
        table = blocks.open([*tokens, 0], salt=salt)
        try:
            stop = len(table.pages) if limit is None else min(len(table.pages), first + limit)
            pages = self._access.read_pages(list(table.pages[first:stop]))
            parent = table.digests[first - 1] if first else root(salt)
            return PageRun(kind, parent, tuple(tokens[first * size : stop * size]), pages, salt)
        finally:
            blocks.close(table)

    def insert(
        self,
        tokens: Run[int],
        pages: PageBytes,
        salt: bytes,
        *,
        first: int,
        digests: list[Digest] | None = None,
    ) -> Inserted:
        """Put pages ``first``, ``first + 1``, ... of a sequence, of this pool's kind, where they are cached
        and held by nobody. All or none: they need room, and the pages before them.

        digests   of the sequence's pages, if they are known
        """
        blocks, size, count = self._blocks, self._blocks.page_size, len(pages)
        end = first + count
        table = blocks.open([*tokens[: end * size], 0], salt=salt, digests=digests)
        try:
            found = len(table.pages)
            if found >= end:
                return Inserted(0, count, 0)
            if found < first or not blocks.reserve(table, end * size):
                return Inserted(0, 0, count)
            self._access.write_pages(list(table.pages[found:]), pages[found - end :])
            blocks.commit(table, tokens, end * size)
            self._note(tokens, table.digests, salt, first, end)
            return Inserted(end - found, found - first, 0)
        finally:
            blocks.close(table)

    def note(self, step: Step) -> None:
        """Remember what a committed step has published."""
        if not self._remember:
            return
        size = self._blocks.page_size
        for sequence, start, stop, _, _ in step.work:
            first, last = start // size, stop // size
            if first < last:
                self._note_sequence(sequence, first, min(last, len(sequence.digests)))

    def chains(self, max_pages: int) -> list[Chain]:
        """All pages that can be found and are remembered, each once, those before others first."""
        entries = self._findable()
        children: dict[Digest | None, list[Digest]] = {}
        for digest, entry in entries.items():
            children.setdefault(entry.parent, []).append(digest)
        chains: list[Chain] = []
        todo: list[tuple[Digest, list[int], int]] = [(digest, [], 0) for digest in children.get(None, ())]
        while todo:
            digest, before, first = todo.pop()
            tokens, stop, salt = [*before, *entries[digest].tokens], first + 1, entries[digest].salt
            following = children.get(digest, [])
            while len(following) == 1 and stop - first < max_pages:
                tokens += entries[following[0]].tokens
                stop, following = stop + 1, children.get(following[0], [])
            chains.append(Chain(tokens, salt, first, stop))
            todo += [(child, tokens, stop) for child in following]
        return chains

    def _note_sequence(self, sequence: Sequence, first: int, last: int) -> None:
        self._note(sequence.tokens, sequence.digests, sequence.salt, first, last)

    def _note(self, tokens: Run[int], digests: Run[Digest], salt: bytes, first: int, last: int) -> None:
        if not self._remember:
            return
        size, entries = self._blocks.page_size, self._entries
        for index in range(first, last):
            parent = digests[index - 1] if index else None
            entries[digests[index]] = _Entry(parent, tuple(tokens[index * size : (index + 1) * size]), salt)
        if len(entries) > 2 * self._blocks.num_pages:
            self._entries = self._findable()

    def _findable(self) -> dict[Digest, _Entry]:
        find = self._blocks.find
        return {digest: entry for digest, entry in self._entries.items() if find(digest) is not None}
