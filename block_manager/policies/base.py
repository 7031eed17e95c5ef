from __future__ import annotations

from collections import OrderedDict, abc
from itertools import islice
from typing import Protocol, TypeVar

from ..types import Digest, PageId


class EvictionPolicy(Protocol):
    """Order in which idle cached pages are evicted.

    A page is listed from ``release`` until ``reuse`` or ``evict`` removes it.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> abc.Iterator[PageId]: ...

    def release(self, pages: abc.Sequence[PageId], digests: abc.Sequence[Digest | None]) -> None:
        """List pages that have become idle; a sequence's last page comes first."""

    def reuse(self, pages: abc.Sequence[PageId]) -> None:
        """Remove pages that sequences hold again; skip pages that are not listed."""

    def evict(self, num_pages: int) -> list[PageId]:
        """Remove ``num_pages`` pages from the list, the least useful first, and return them."""


POLICIES: dict[str, abc.Callable[[int], EvictionPolicy]] = {}
"""Constructors of eviction policies by name; each takes the number of pages of its pool."""

Factory = TypeVar("Factory", bound=abc.Callable[[int], EvictionPolicy])


def register(name: str) -> abc.Callable[[Factory], Factory]:
    """Return a decorator that registers a policy under this name.

    A policy is a class or function that takes the number of pages.
    """

    def enter(factory: Factory) -> Factory:
        assert name not in POLICIES, f"two eviction policies are called {name!r}"
        POLICIES[name] = factory
        return factory

    return enter


def make_policy(name: str, num_pages: int) -> EvictionPolicy:
    """Return a policy for a pool of this size. Raises ValueError for an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name](num_pages)


@register("lru")
class LRU:
    def __init__(self, num_pages: int = 0) -> None:  # noqa: ARG002
        self._idle: OrderedDict[PageId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> abc.Iterator[PageId]:
        return iter(self._idle)

    def release(self, pages: abc.Sequence[PageId], digests: abc.Sequence[Digest | None]) -> None:  # noqa: ARG002
        idle = self._idle
        for page in pages:
            idle[page] = None

    def reuse(self, pages: abc.Sequence[PageId]) -> None:
        idle = self._idle
        for page in pages:
            if page in idle:
                del idle[page]

    def evict(self, num_pages: int) -> list[PageId]:
        idle = self._idle
        pages = list(islice(idle, num_pages))
        for page in pages:
            del idle[page]
        return pages
