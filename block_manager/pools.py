"""The pools of all kinds of layers: how big they are and how their pages stand, whoever has a table."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Run

from .events import EventLog
from .groups import Groups
from .types import Digest, PageCounts, PageGroup, PageId


class Pools:
    """What can be asked and done without a page table.

    Where no group is named, pages are those of the first.

    max_pinned       pages of each pool that ``Pins`` may hold; sequences are not let in on them
    quantize_after   of tables that are opened without a number of their own
    """

    def __init__(self, groups: Groups, *, max_pinned: int, quantize_after: int) -> None:
        smallest = min(group.spec.num_pages for group in groups)
        if not 0 <= max_pinned < smallest:
            raise ValueError(
                f"max_pinned must be at least 0 and less than the {smallest} pages of the pool, "
                f"got {max_pinned}; sequences need room, too"
            )
        self.max_pinned = max_pinned
        self.quantize_after = quantize_after
        self._groups = groups
        self._pool = groups[0].pool

    @property
    def groups(self) -> tuple[PageGroup, ...]:
        return tuple(group.spec for group in self._groups)

    @property
    def capacity(self) -> int:
        """Positions that one sequence can have, whatever is pinned."""
        return self.capacity_with(self.quantize_after)

    def capacity_with(self, quantize_after: int) -> int:
        """The same for sequences that are quantized after so many tokens."""
        max_chunk, max_pinned = self._groups.max_chunk, self.max_pinned
        return min(group.capacity(max_chunk, max_pinned, quantize_after) for group in self._groups)

    @property
    def max_chunk(self) -> int:
        """Positions of one sequence that may be written at a time."""
        return self._groups.max_chunk

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_held(self) -> int:
        return self._pool.num_pages - self._pool.num_idle

    @property
    def num_idle(self) -> int:
        """Pages that can be handed out: cached and empty ones."""
        return self._pool.num_idle

    @property
    def num_idle_cached(self) -> int:
        return self._pool.num_idle_cached

    @property
    def num_idle_empty(self) -> int:
        return self._pool.num_idle_empty

    def idle_pages(self) -> tuple[int, ...]:
        """``num_idle`` of every group."""
        return self._groups.idle_pages()

    @property
    def twin_counts(self) -> PageCounts | None:
        """Of 16-bit twins, in all groups that are some; None without any."""
        return self._groups.twin_counts()

    @property
    def num_evicted(self) -> int:
        """Cached pages of all groups that were given to somebody else, since the start."""
        return sum(group.pool.num_evicted for group in self._groups)

    @property
    def events(self) -> EventLog:
        """What could be found since when, in order."""
        return self._pool.events

    def find(self, digest: Digest, group: int = 0) -> PageId | None:
        """A group's page with these contents, if it can be found now. Nothing is held."""
        return self._groups[group].pool.find(digest)

    def num_findable(self, digests: Run[Digest], *, quantize_after: int | None = None) -> int:
        """After how many of these pages ``open`` would let a sequence go on."""
        after = self.quantize_after if quantize_after is None else quantize_after
        return self._groups.num_findable(digests, after)

    def needed_pages(self, num_pages: int, *, group: int, quantize_after: int | None = None) -> Iterable[int]:
        """The pages of a group without which a sequence cannot go on after ``num_pages`` full ones, last
        first. Arithmetic alone: any thread may ask."""
        after = self.quantize_after if quantize_after is None else quantize_after
        return self._groups[group].needed(num_pages, after)

    def flush(self) -> int:
        """Forget the contents of every idle page of all groups; returns how many there were."""
        return self._groups.flush()
