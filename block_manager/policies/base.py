"""Which idle page gives up its contents next: what a policy is, and the policies by name."""

from __future__ import annotations

from collections import abc
from typing import Protocol, TypeVar

from ..types import Digest, PageId


class EvictionPolicy(Protocol):
    """Keeps the idle pages whose contents can still be found, and says which to give up.

    A page is listed from ``release`` until ``reuse`` or ``evict`` takes it off. Methods work on runs
    of pages, because a call per page costs more than the page.
    """

    def __len__(self) -> int:
        """Pages that are listed."""

    def __iter__(self) -> abc.Iterator[PageId]:
        """The listed pages, in no particular order."""

    def release(self, pages: abc.Sequence[PageId], digests: abc.Sequence[Digest | None]) -> None:
        """List pages that have become idle, those of a sequence's tail first.

        digests   of all pages of the pool; only to be read
        """

    def reuse(self, pages: abc.Sequence[PageId]) -> None:
        """These pages were found; listed ones leave the list, the others are held by somebody."""

    def evict(self, num_pages: int) -> list[PageId]:
        """Take so many pages off the list, which has at least as many; the worst first."""


POLICIES: dict[str, abc.Callable[[int], EvictionPolicy]] = {}
"""By name, what makes a policy for a pool of so many pages."""

Factory = TypeVar("Factory", bound=abc.Callable[[int], EvictionPolicy])


def register(name: str) -> abc.Callable[[Factory], Factory]:
    """Enter what makes a policy, a class or a function of the number of pages, under a name.

    A module that registers one is imported by ``octavo_lab.policies``; ``octavo replay`` then knows it.
    """

    def enter(factory: Factory) -> Factory:
        assert name not in POLICIES, f"two eviction policies are called {name!r}"
        POLICIES[name] = factory
        return factory

    return enter


def make_policy(name: str, num_pages: int) -> EvictionPolicy:
    """Return a policy for a pool of this size; ValueError if there is none of this name."""
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name](num_pages)
