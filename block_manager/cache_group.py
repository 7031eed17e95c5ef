"""The common interface of cache groups: layers that share a pool, of K/V pages or of recurrent states."""

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
    """The pool of one group of layers. A recurrent state counts as a page that has all positions before it.

    index   number of the group; groups of states come last
    pool    pages of K/V, or slots of states
    """

    index: int
    spec: KVGroupSpec | RecurrentState
    pool: PagePool

    @abstractmethod
    def held(self, table: PageTable) -> abc.Sequence[PageId]:
        """Return the pages of this group that a table holds."""

    @abstractmethod
    def longest_prefix(
        self, digests: abc.Sequence[Digest], num_pages: int, table: PageTable | None = None
    ) -> int:
        """Return the largest number of pages, up to ``num_pages``, after which a sequence can continue.

        A sequence can continue if every page that its next query reads is cached, or held by ``table``. Give
        ``table`` only if that table is to be shortened.
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
    ) -> int | None:
        """Put pages from ``first`` on into the cache; no table holds them. See ``BlockManager.insert``."""
