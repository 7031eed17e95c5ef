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
from itertools import islice

from .types import Digest, PageId


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
    """An eviction policy: least recently released first, but those that were stepped down before all."""

    def __init__(self) -> None:
        self._idle: OrderedDict[PageId, None] = OrderedDict()  # next at the front

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> abc.Iterator[PageId]:
        return iter(self._idle)

    def release(self, pages: abc.Sequence[PageId], digests: abc.Sequence[Digest | None]) -> None:  # noqa: ARG002
        for page in pages:
            self._idle[page] = None

    def reuse(self, pages: abc.Sequence[PageId]) -> None:
        for page in pages:
            self._idle.pop(page, None)

    def evict(self, num_pages: int) -> list[PageId]:
        pages = list(islice(self._idle, num_pages))
        self.reuse(pages)
        return pages

    def demote(self, page: PageId) -> None:
        """Let an idle snapshot go next."""
        if page in self._idle:
            self._idle.move_to_end(page, last=False)
