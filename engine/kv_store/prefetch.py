from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.block_manager import BlockManager, Digest
from octavo.block_manager.digests import root
from octavo.kernels.page_bytes import PageBytes
from octavo.scheduler import Sequence as Served

from .transfer import PageTransfer


@dataclass(frozen=True, slots=True)
class FetchedPage:
    group: int
    index: int
    data: PageBytes


class PrefetchJob:
    """Pages of one prompt that a medium reads.

    With ``asks``, the remote cache is asked first which of them it has. ``token_s`` is the seconds to compute
    a token, if known: slower reads are left out.
    """

    def __init__(self, sequence: Served, blocks: BlockManager, token_s: float | None = None) -> None:
        tokens, salt, media = sequence.tokens, sequence.salt, sequence.media
        self.tokens = list(tokens)
        self.media = media
        self.digests = list(blocks.page_digests(tokens, sequence.digests, salt=salt, media=media))
        self.root = root(salt)
        self.pages: deque[FetchedPage] = deque()
        self.ended = False
        self.token_s, self.asks = token_s, False
        self.known = [
            [blocks.find(digest, group) is not None for digest in self.digests]
            for group in range(len(blocks.parts))
        ]
        self._blocks = blocks
        self._found = blocks.num_findable(self.digests)
        self._forget()

    @property
    def missing(self) -> list[Digest]:
        return self.digests[self._found :]

    def take(self, num_bytes: int) -> list[FetchedPage]:
        """Return the next pages, up to about ``num_bytes``."""
        taken: list[FetchedPage] = []
        while self.pages and num_bytes > 0:
            taken.append(self.pages.popleft())
            num_bytes -= taken[-1].data.nbytes
        return taken

    def parent(self, index: int) -> Digest:
        return self.digests[index - 1] if index else self.root

    def present(self, group: int, index: int) -> None:
        self.known[group][index] = True

    def absent(self, group: int, index: int) -> None:
        self._there[group][index] = False

    def num_unreachable(self, has: Callable[[Digest, int], bool]) -> int:
        end = self._reachable(has)
        self._forget()
        return len(self.digests) - end

    def plan(self, has: Callable[[Digest, int], bool]) -> list[tuple[int, int]]:
        end = self._reachable(has)
        if end <= self._found:
            return []
        return [
            (number, index)
            for number in range(len(self.known))
            for index in sorted(self._blocks.needed_pages(end, group=number))
            if not self.known[number][index]
        ]

    def gain(self, has: Callable[[Digest, int], bool]) -> int:
        return max(0, self._reachable(has) - self._found)

    def is_quicker(self, has: Callable[[Digest, int], bool], page_bytes: Sequence[int], rate: Rate) -> bool:
        """Whether reading the pages is expected to be faster than computing them."""
        if self.token_s is None:
            return True
        num_bytes = sum(page_bytes[group] for group, _ in self.plan(has))
        gained = self.gain(has) * self._blocks.page_size
        return gained > 0 and rate.is_within(num_bytes, gained * self.token_s)

    def _reachable(self, has: Callable[[Digest, int], bool]) -> int:
        groups, end = self._blocks.parts, len(self.digests)
        for number, group in enumerate(groups):
            if group.needs_every_page:
                end = next((i for i in range(end) if not self._is_there(number, i, has)), end)
        while True:
            missing = next(
                (
                    index
                    for number, group in enumerate(groups)
                    if not group.needs_every_page
                    for index in self._blocks.needed_pages(end, group=number)
                    if not self._is_there(number, index, has)
                ),
                None,
            )
            if missing is None:
                return end
            end = missing

    def _forget(self) -> None:
        self._there: list[list[bool | None]] = [[True if k else None for k in group] for group in self.known]

    def _is_there(self, group: int, index: int, has: Callable[[Digest, int], bool]) -> bool:
        there = self._there[group][index]
        if there is None:
            there = self._there[group][index] = has(self.digests[index], group)
        return there


def adopt(
    transfer: PageTransfer, fetch: PrefetchJob, pages: Sequence[FetchedPage], salt: bytes
) -> tuple[int, bool]:
    num_new = 0
    for run in _runs(pages):
        group, first = run[0].group, run[0].index
        new = transfer.insert(
            fetch.tokens,
            np.stack([page.data for page in run]),
            salt,
            first=first,
            group=group,
            digests=fetch.digests[: first + len(run)],
            media=fetch.media,
        )
        if new is None:
            return num_new, False
        num_new += new
    return num_new, True


def _runs(pages: Sequence[FetchedPage]) -> list[list[FetchedPage]]:
    runs: list[list[FetchedPage]] = []
    for page in pages:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.group, last.index + 1) == (page.group, page.index):
            runs[-1].append(page)
        else:
            runs.append([page])
    return runs


DECAY = 0.98  # weight of a transfer relative to the next transfer
OPTIMISM = 0.9


class Rate:
    """Moving average of seconds per byte."""

    def __init__(self) -> None:
        self._seconds = self._bytes = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        self._seconds = DECAY * self._seconds + seconds
        self._bytes = DECAY * self._bytes + num_bytes

    def seconds(self, num_bytes: int) -> float:
        """Return the expected seconds for ``num_bytes``; 0 before the first transfer."""
        return num_bytes * self._seconds / self._bytes if self._bytes else 0.0

    def is_within(self, num_bytes: int, limit_s: float) -> bool:
        if self.seconds(num_bytes) < limit_s:
            return True
        self._seconds *= OPTIMISM
        return False
