"""Which snapshots of recurrent state are taken, and which goes first.

A state may be as large as the K/V of hundreds of tokens, so a snapshot at every page would starve everything
else. Two kinds are taken of each sequence:

tail       the last page that is full: what the next turn of a conversation begins with. While a sequence
           is decoded there is one, which moves on from page to page
junction   where pages were found further than states: what several prompts begin with

Where a slot is no bigger than a page, every page gets one.
"""

from __future__ import annotations

from collections import OrderedDict, abc
from math import log2

from .types import Digest, PageId

CLASSES_PER_DOUBLING = 4  # of worth: in a class the older goes first
STEPPED_DOWN = -(1 << 20)  # a class below all others


def wanted_snapshots(
    start: int,
    stop: int,
    *,
    page_size: int,
    junction: int,
    every_page: bool,
    num_known: int,
    with_tail: bool = True,
) -> list[int]:
    """Return after how many full pages a state is worth keeping, of a step that computes positions
    [start, stop). ``junction``: pages that were found (0: none is wanted); ``num_known``: tokens of the
    sequence so far; ``with_tail``: whether its last full page is wanted."""
    first, last = start // page_size + 1, stop // page_size  # full pages after the step's first token
    if every_page:
        return list(range(first, last + 1))
    pages = {junction} if first <= junction <= last else set()
    tail = num_known // page_size  # which the last step of a prompt may begin behind
    if with_tail and first <= tail <= last:
        pages.add(tail)
    return sorted(pages)


class SnapshotOrder:
    """An eviction policy: the snapshot that promises least goes first.

    It promises what it is worth over the time since it was released, in releases: what saves more for its
    bytes, and what was of use before, may be older. Those that were stepped down go before all.
    """

    def __init__(self) -> None:
        self._idle: dict[int, OrderedDict[PageId, int]] = {}  # by class of worth: when released, oldest first
        self._listed_in: dict[PageId, int] = {}
        self._worth: dict[PageId, int] = {}
        self._now = 0

    def __len__(self) -> int:
        return len(self._listed_in)

    def __iter__(self) -> abc.Iterator[PageId]:
        return iter(self._listed_in)

    def value(self, page: PageId, worth: float) -> None:
        """From its next release on a snapshot is worth so much."""
        self._worth[page] = round(CLASSES_PER_DOUBLING * log2(worth))

    def release(self, pages: abc.Sequence[PageId], digests: abc.Sequence[Digest | None]) -> None:  # noqa: ARG002
        for page in pages:
            self._now += 1
            self._list(page, self._worth[page])

    def reuse(self, pages: abc.Sequence[PageId]) -> None:
        for page in pages:
            if page in self._listed_in:
                worth = self._listed_in.pop(page)
                del self._idle[worth][page]
                if not self._idle[worth]:
                    del self._idle[worth]

    def evict(self, num_pages: int) -> list[PageId]:
        pages = []
        for _ in range(num_pages):
            pages.append(self.next())
            self.reuse(pages[-1:])
        return pages

    def next(self) -> PageId:
        """The listed snapshot that goes first."""
        oldest = {worth: next(iter(pages.items())) for worth, pages in self._idle.items()}
        worth = min(
            oldest, key=lambda worth: worth / CLASSES_PER_DOUBLING - log2(self._now - oldest[worth][1] + 1)
        )
        return oldest[worth][0]

    def demote(self, page: PageId) -> None:
        """Let an idle snapshot go next."""
        if page in self._listed_in:
            self.reuse([page])
            self._list(page, STEPPED_DOWN)

    def _list(self, page: PageId, worth: int) -> None:
        self._listed_in[page] = worth
        self._idle.setdefault(worth, OrderedDict())[page] = self._now
