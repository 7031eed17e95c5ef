"""The interface of eviction policies, their registry, and the default policy LRU."""

from __future__ import annotations

from collections import OrderedDict, abc
from itertools import islice
from typing import Protocol, TypeVar

from ..types import Digest, PageId


class EvictionPolicy(Protocol):
    """Idle cached pages, and the order in which they are evicted.

    A page is listed from ``release`` until ``reuse`` or ``evict`` removes it. Methods work on runs of pages,
    because a call per page would cost more than the work on the page.
    """

    def __len__(self) -> int:
        """Return the number of listed pages."""

    def __iter__(self) -> abc.Iterator[PageId]:
        """Yield the listed pages, in no particular order."""

    def release(self, pages: abc.Sequence[PageId], digests: abc.Sequence[Digest | None]) -> None:
        """Add pages that have become idle to the list; a sequence's last page comes first.

        digests   digests of all pages of the pool; read-only
        """

    def reuse(self, pages: abc.Sequence[PageId]) -> None:
        """Remove pages from the list because sequences hold them again; skip pages that are not listed."""

    def evict(self, num_pages: int) -> list[PageId]:
        """Remove ``num_pages`` pages from the list, the least useful first; never more than are listed."""


POLICIES: dict[str, abc.Callable[[int], EvictionPolicy]] = {}
"""Constructors of eviction policies by name; each takes the number of pages of its pool."""

Factory = TypeVar("Factory", bound=abc.Callable[[int], EvictionPolicy])


def register(name: str) -> abc.Callable[[Factory], Factory]:
    """Return a decorator that registers a policy: a class or function that takes the number of pages.

    If ``octavo_lab.policies`` imports the policy's module, ``octavo replay`` offers the policy.
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
    """Evicts the least recently released page first, so a sequence's last pages before its first."""

    def __init__(self, num_pages: int = 0) -> None:  # noqa: ARG002
        self._idle: OrderedDict[PageId, None] = OrderedDict()  # the next page to evict is at the front

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> abc.Iterator[PageId]:
        return iter(self._idle)

    def release(self, pages: abc.Sequence[PageId], digests: abc.Sequence[Digest | None]) -> None:  # noqa: ARG002
        idle = self._idle
        for page in pages:  # takes a third of the time of update()
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
