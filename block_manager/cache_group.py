"""A group of layers whose part of a cached prefix has a pool of its own: pages of K/V, or states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc

from .page_pool import PagePool
from .spec import KVGroupSpec, RecurrentState
from .types import Digest, PageId, PageTable

Fill = abc.Callable[[list[int], list[PageId]], None]
"""Puts the contents of pages of a sequence, by their indices in it, into pages of a pool."""


class CacheGroup(ABC):
    """A part of all page tables. A state is a page here: one that stands for all positions before it.

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
        """Return the greatest number of pages, at most ``num_pages``, after which a sequence can go on.

        All it would see is cached, or held by ``table``, which is shortened."""

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
        """Cache what belongs to the pages from ``first`` on, held by nobody; see ``BlockManager.insert``."""
