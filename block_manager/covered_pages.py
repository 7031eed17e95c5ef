"""Pages that some snapshot of recurrent state covers: it lies at the page or after it."""

from __future__ import annotations

from collections import Counter, abc

from .types import Digest


class CoveredPages:
    """Pages before snapshots, as a tree; pages that no snapshot covers cannot be used.

    The tree counts for each page its own snapshot and the covered pages that follow it.
    """

    def __init__(self) -> None:
        self._counts: Counter[Digest] = Counter()
        self._before: dict[Digest, Digest | None] = {}

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._counts

    def add(self, digests: abc.Sequence[Digest], num_pages: int) -> None:
        """Note a new snapshot after the first ``num_pages`` of these pages."""
        for index in range(num_pages - 1, -1, -1):
            digest = digests[index]
            self._counts[digest] += 1
            if self._counts[digest] > 1:
                return
            self._before[digest] = digests[index - 1] if index else None

    def remove(self, digest: Digest) -> list[Digest]:
        """Note that the snapshot after this page is gone; return the pages no longer covered, last first."""
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
        """Raise AssertionError unless exactly these snapshots cover pages."""
        expected = Counter(snapshots)
        expected.update(before for before in self._before.values() if before is not None)
        assert expected == self._counts, "a page is covered by other snapshots than there are"
