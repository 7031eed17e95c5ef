"""Tokens of published pages, by digest."""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

from .types import Digest


class PageContents(NamedTuple):
    """The contents of a page, and which page precedes it in its sequence.

    tokens   tokens and media of the page, as from ``digests.page_contents``
    parent   digest of the page before it; None at a sequence's start
    """

    tokens: bytes
    parent: Digest | None
    salt: bytes


class PageIndex:
    """The contents of published pages, by digest.

    A page does not record the tokens from which it was computed. Features that need them (event watchers,
    saving the whole cache) turn recording on, which costs time and about 200 bytes per page.

    The size is bounded. When there are more than about twice ``capacity`` pages, those that are neither
    cached nor before a cached page are dropped. (The digest of a cached page depends on the pages before it.)

    is_cached   function that tells whether a page is cached in any pool
    recording   whether pages published from now on are recorded
    """

    def __init__(self, capacity: int, *, is_cached: abc.Callable[[Digest], bool]) -> None:
        self.recording = False
        self._is_cached = is_cached
        self._contents: dict[Digest, PageContents] = {}
        self._capacity = self._most = 2 * capacity

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._contents

    def add(
        self,
        digests: abc.Iterable[Digest],
        contents: abc.Iterable[bytes],
        parent: Digest | None,
        salt: bytes,
    ) -> None:
        """Record consecutive pages of a sequence, the first of which follows ``parent``."""
        for digest, tokens in zip(digests, contents, strict=True):
            self._contents[digest] = PageContents(tokens, parent, salt)
            parent = digest
        if len(self._contents) > self._most:
            self._contents = self.worth_keeping()
            self._most = max(self._capacity, 2 * len(self._contents))

    def cached(self, is_cached: abc.Callable[[Digest], bool]) -> dict[Digest, PageContents]:
        """Return the contents of the known pages for which ``is_cached`` is true."""
        return {digest: page for digest, page in self._contents.items() if is_cached(digest)}

    def worth_keeping(self) -> dict[Digest, PageContents]:
        """Return the contents of pages that are cached or come before a cached page in a sequence."""
        contents, wanted = self._contents, set[Digest]()
        for digest in contents:
            at: Digest | None = digest if self._is_cached(digest) else None
            while at is not None and at in contents and at not in wanted:
                wanted.add(at)
                at = contents[at].parent
        return {digest: page for digest, page in contents.items() if digest in wanted}


def parents_first(
    contents: abc.Mapping[Digest, PageContents],
) -> abc.Iterator[tuple[Digest, PageContents]]:
    """Yield every page whose whole prefix is in ``contents``, parents before children."""
    done = set[Digest]()
    for digest in contents:
        chain: list[Digest] = []
        at: Digest | None = digest
        while at is not None and at not in done and at in contents:
            chain.append(at)
            at = contents[at].parent
        if at is not None and at not in done:
            continue  # an earlier page was evicted, or published before recording began
        for known in reversed(chain):
            done.add(known)
            yield known, contents[known]
