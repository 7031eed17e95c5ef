"""Eviction order of a group with a window: first pages that windows have moved past, then all others."""

from __future__ import annotations

from collections import OrderedDict, abc

from .policies import EvictionPolicy
from .types import Digest, PageId


class PassedFirst:
    """An eviction policy around another one, which orders the pages that a sequence may continue from.

    A prompt of n pages writes n of them, but a hit at its end needs only the last few. Without this order, a
    pool of a tenth of the other group's size would keep a tenth of its prompts. A page that a window has
    moved past is needed only if another sequence branches off just there. So such pages are evicted first,
    the least recently passed before others. Branch points are noted when they occur: see
    ``PageTable.partings``.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._passed: OrderedDict[PageId, None] = OrderedDict()  # the next page to evict is at the front

    def __len__(self) -> int:
        return len(self._passed) + len(self._policy)

    def __iter__(self) -> abc.Iterator[PageId]:
        yield from self._passed
        yield from self._policy

    def release(self, pages: abc.Sequence[PageId], digests: abc.Sequence[Digest | None]) -> None:
        self._policy.release(pages, digests)

    def release_passed(self, pages: abc.Sequence[PageId], digests: abc.Sequence[Digest | None]) -> None:  # noqa: ARG002
        """List pages that a window has moved past, in the order of the sequence."""
        for page in pages:
            self._passed[page] = None

    def reuse(self, pages: abc.Sequence[PageId]) -> None:
        passed, others = self._passed, []
        for page in pages:
            if page in passed:
                del passed[page]
            else:
                others.append(page)
        if others:
            self._policy.reuse(others)

    def evict(self, num_pages: int) -> list[PageId]:
        passed = self._passed
        first = min(num_pages, len(passed))
        pages = [passed.popitem(last=False)[0] for _ in range(first)]
        return pages if first == num_pages else pages + self._policy.evict(num_pages - first)
