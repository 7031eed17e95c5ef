"""Which pages some snapshot of recurrent state lies at or behind: the others are of no use to anybody."""

from __future__ import annotations

from collections import Counter, abc

from .types import Digest


class CoveredPages:
    """The beginnings of sequences that end at snapshots, as a tree of pages.

    A page has one for its own snapshot, and one for each page behind it that is covered.
    """

    def __init__(self) -> None:
        self._counts: Counter[Digest] = Counter()
        self._before: dict[Digest, Digest | None] = {}

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._counts

    def add(self, digests: abc.Sequence[Digest], num_pages: int) -> None:
        """There is a snapshot after so many of these pages that was not there before."""
        for index in range(num_pages - 1, -1, -1):
            digest = digests[index]
            self._counts[digest] += 1
            if self._counts[digest] > 1:
                return
            self._before[digest] = digests[index - 1] if index else None

    def remove(self, digest: Digest) -> list[Digest]:
        """The snapshot after this page is lost: return the pages that none covers any more, last first."""
        lost = []
        last: Digest | None = digest
        while last is not None:
            self._counts[last] -= 1
            if self._counts[last]:
                break
            del self._counts[last]
            lost.append(last)
            last = self._before.pop(last)
        return lost

    def check(self, snapshots: abc.Iterable[Digest]) -> None:
        """Raise AssertionError unless it is these snapshots that cover pages."""
        expected = Counter(snapshots)
        expected.update(before for before in self._before.values() if before is not None)
        assert expected == self._counts, "a page is covered by other snapshots than there are"
