from __future__ import annotations

from collections import abc
from typing import NamedTuple

from .types import Digest


class PageContents(NamedTuple):
    """The tokens and images of a page, and the digest of the page before it (None: no page)."""

    tokens: bytes
    parent: Digest | None
    salt: bytes


class PageIndex:
    """Contents of published pages, by digest.

    Recording costs time and about 200 bytes per page. Above about twice ``capacity`` pages, the index drops
    pages that are neither cached nor before a cached page.
    """

    def __init__(self, capacity: int, *, is_cached: abc.Callable[[Digest], bool]) -> None:
        self.recording = False
        self._is_cached = is_cached
        self._contents: dict[Digest, PageContents] = {}
        self._capacity = self._max_pages = 2 * capacity

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
        """Record consecutive pages of a sequence; ``parent`` is the digest before the first page."""
        for digest, tokens in zip(digests, contents, strict=True):
            self._contents[digest] = PageContents(tokens, parent, salt)
            parent = digest
        if len(self._contents) > self._max_pages:
            self._contents = self.cached_pages()
            self._max_pages = max(self._capacity, 2 * len(self._contents))

    def cached(self, is_cached: abc.Callable[[Digest], bool]) -> dict[Digest, PageContents]:
        return {digest: page for digest, page in self._contents.items() if is_cached(digest)}

    def cached_pages(self) -> dict[Digest, PageContents]:
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
    """Yield the pages whose whole prefix is in ``contents``, parents before children."""
    done = set[Digest]()
    for digest in contents:
        chain: list[Digest] = []
        at: Digest | None = digest
        while at is not None and at not in done and at in contents:
            chain.append(at)
            at = contents[at].parent
        if at is not None and at not in done:
            continue
        for known in reversed(chain):
            done.add(known)
            yield known, contents[known]
