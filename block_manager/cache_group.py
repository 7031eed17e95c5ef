"""A group of layers with its own pool for cached prefixes: pages of K/V, or recurrent states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc

from .page_pool import PagePool
from .spec import KVGroupSpec, RecurrentState
from .types import Digest, PageId, PageTable

Fill = abc.Callable[[list[int], list[PageId]], None]
"""Function that fills pages of a pool with contents; it gets the pages' indices in the sequence and their
ids."""


class CacheGroup(ABC):
    """One group's part of all page tables. A state counts as a page that contains all positions before it.

    index   number of the group; groups of states come last
    pool    pages of K/V, or slots of states
    """

    index: int
    spec: KVGroupSpec | RecurrentState
    pool: PagePool

    @abstractmethod
    def held(self, table: PageTable) -> abc.Sequence[PageId]:
        """Return the pages that a table holds."""

    @abstractmethod
    def longest_prefix(
        self, digests: abc.Sequence[Digest], num_pages: int, table: PageTable | None = None
    ) -> int:
        """Return the largest number of pages, up to ``num_pages``, after which a sequence can continue.

        All pages that it then needs are cached, or held by ``table``, which is to be shortened.
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
        """Cache the contents of pages from ``first`` on, without a holder; see ``BlockManager.insert``."""
