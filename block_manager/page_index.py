"""What the digests of pages stand for: tokens, told in order of the sequences."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import NamedTuple

from .digests import unpack
from .types import Digest


class PageContents(NamedTuple):
    """What a page holds: its own tokens (as from ``digests.pack``), after those of ``parent``, which is None
    at a sequence's start."""

    tokens: bytes
    parent: Digest | None
    salt: bytes


@dataclass(frozen=True, slots=True)
class PageChain:
    """Pages ``[first, stop)`` of a sequence.

    tokens   of the sequence, from its start to the end of the last of these pages
    """

    tokens: list[int]
    salt: bytes
    first: int
    stop: int


class PageIndex:
    """The contents of published pages, by digest.

    A digest can be looked up for its page, but a page does not say which tokens it was computed from.
    Those who need to know (watchers of events, saving the whole cache) switch recording on: it costs time
    and some 200 bytes per page.

    Bounded: when it has outgrown twice the pools, it forgets pages that are not cached, unless a cached
    page continues them, because then their tokens are part of that page's name.

    is_cached   whether a page can be found in any pool
    recording   whether pages that are published from now on are remembered
    """

    def __init__(self, capacity: int, *, is_cached: abc.Callable[[Digest], bool]) -> None:
        self.recording = False
        self._is_cached = is_cached
        self._contents: dict[Digest, PageContents] = {}
        self._capacity = self._most = 2 * capacity

    def __len__(self) -> int:
        return len(self._contents)

    def add(
        self,
        digests: abc.Iterable[Digest],
        contents: abc.Iterable[bytes],
        parent: Digest | None,
        salt: bytes,
    ) -> None:
        """Remember consecutive pages of a sequence, the first of which follows ``parent``."""
        for digest, tokens in zip(digests, contents, strict=True):
            self._contents[digest] = PageContents(tokens, parent, salt)
            parent = digest
        if len(self._contents) > self._most:
            self._contents = self._worth_keeping()
            self._most = max(self._capacity, 2 * len(self._contents))

    def prefixes(self, is_cached: abc.Callable[[Digest], bool]) -> abc.Iterator[tuple[Digest, PageContents]]:
        """Yield every known page for which ``is_cached``, and for all before it, parents before children."""
        contents, done = self._contents, set[Digest]()
        for digest in contents:
            chain: list[Digest] = []
            at: Digest | None = digest
            while at is not None and at not in done and at in contents and is_cached(at):
                chain.append(at)
                at = contents[at].parent
            if at is not None and at not in done:
                continue  # its beginning was evicted, or published before recording began
            for known in reversed(chain):
                done.add(known)
                yield known, contents[known]

    def chains(self, max_pages: int) -> list[PageChain]:
        """Return all cached pages, and those that lead to them, each once: runs of at most ``max_pages`` that
        end where sequences part, those that others continue first."""
        contents = self._worth_keeping()
        children: dict[Digest | None, list[Digest]] = {}
        for digest, page in contents.items():
            children.setdefault(page.parent, []).append(digest)
        chains: list[PageChain] = []
        todo: list[tuple[Digest, list[int], int]] = [(digest, [], 0) for digest in children.get(None, ())]
        while todo:
            digest, before, first = todo.pop()
            tokens, stop = [*before, *unpack(contents[digest].tokens)], first + 1
            following = children.get(digest, [])
            while len(following) == 1 and stop - first < max_pages:
                tokens += unpack(contents[following[0]].tokens)
                stop, following = stop + 1, children.get(following[0], [])
            chains.append(PageChain(tokens, contents[digest].salt, first, stop))
            todo += [(child, tokens, stop) for child in following]
        return chains

    def _worth_keeping(self) -> dict[Digest, PageContents]:
        """Return the pages that are cached, and those before them."""
        contents, wanted = self._contents, set[Digest]()
        for digest in contents:
            at: Digest | None = digest if self._is_cached(digest) else None
            while at is not None and at in contents and at not in wanted:
                wanted.add(at)
                at = contents[at].parent
        return {digest: page for digest, page in contents.items() if digest in wanted}
