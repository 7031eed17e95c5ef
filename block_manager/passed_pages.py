"""Which idle pages of a group with a window go next: those that windows have moved past, then all others."""

from __future__ import annotations

from collections import OrderedDict, abc

from .policies import EvictionPolicy
from .types import Digest, PageId


class PassedFirst:
    """An eviction policy around another one, which is left with the pages that somebody may go on from.

    A prompt of n pages writes n of them, of which a hit at its end needs the last few. Were they all equal, a
    pool that is a tenth of the other group's would remember a tenth of its prompts. A page that a window has
    moved past is needed only where another sequence parts from this one just there, so it goes first, the
    least recently passed before others. That somebody parts there is known when it happens: see
    ``PageTable.partings``.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._passed: OrderedDict[PageId, None] = OrderedDict()  # next at the front

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
