from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc

from .page_pool import PagePool
from .spec import KVGroupSpec, RecurrentState
from .types import Digest, PageId, PageTable

Fill = abc.Callable[[list[int], list[PageId]], None]
"""Function ``fill(indices, pages)`` that writes the contents of pages. ``indices`` are the pages' indices in
the sequence; ``pages`` are their ids in the pool."""


class CacheGroup(ABC):
    """A group of layers with its own pool of pages or state slots."""

    index: int
    spec: KVGroupSpec | RecurrentState
    pool: PagePool

    @abstractmethod
    def held_pages(self, table: PageTable) -> abc.Sequence[PageId]: ...

    @abstractmethod
    def longest_prefix(
        self, digests: abc.Sequence[Digest], num_pages: int, table: PageTable | None = None
    ) -> int:
        """Return the longest cached prefix, in pages, after which a sequence can continue.

        Pages that ``table`` holds count as cached.
        """

    @abstractmethod
    def insert(
        self,
        digests: abc.Sequence[Digest],
        first: int,
        fill: Fill,
        *,
        salt: bytes = b"",
        contents: abc.Sequence[bytes] = (),
    ) -> int | None: ...
