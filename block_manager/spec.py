"""Specifications of layer groups: the positions that queries see, and the pages they need.

::

    KVGroupSpec
      FullAttention     queries see everything before them
      SlidingWindow     queries see the last ``window`` positions and the first ``keep``
        ResidualWindow  16-bit rows of a group with quantized pages
    RecurrentState      a state of fixed size per sequence, in slots instead of pages
"""

from __future__ import annotations

import sys
from collections import abc
from dataclasses import dataclass, field

from .types import PageTable

UNBOUNDED = sys.maxsize


def pages_for(num_positions: int, page_size: int) -> int:
    """Return how many pages the first ``num_positions`` positions of a sequence occupy."""
    return -(-num_positions // page_size)


def pages_touched(num_positions: int, page_size: int) -> int:
    """Return how many pages ``num_positions`` consecutive positions can touch, wherever they begin."""
    return (num_positions + page_size - 2) // page_size + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroupSpec:
    """A group of layers that share page tables and a pool.

    window      queries at position p see positions > p - window (None: all up to p)
    keep        the first ``keep`` positions are visible to every query (attention sinks)
    """

    num_pages: int
    window: int | None
    keep: int = 0

    def __post_init__(self) -> None:
        if self.num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {self.num_pages}; give the pool more memory")

    @property
    def needs_every_page(self) -> bool:
        """Whether a sequence needs every page of a prefix to continue after the prefix."""
        return self.window is None

    def window_at(self, position: int) -> int | None:  # noqa: ARG002
        """Return the window of a query at ``position``; None if it sees everything."""
        return self.window

    def widest_window(self) -> int | None:
        return self.window

    def first_visible(self, position: int) -> int:
        """Return the first position that a query at ``position`` can see, apart from attention sinks."""
        window = self.window_at(position)
        return 0 if window is None else max(position - window + 1, 0)

    def max_pages(self, page_size: int, *, max_chunk: int) -> int:
        """Return the most pages that a sequence can hold if a step writes up to ``max_chunk`` positions.

        Without a window the result is ``UNBOUNDED``.
        """
        if (window := self.widest_window()) is None:
            return UNBOUNDED
        return self.sink_pages(page_size) + pages_touched(window - 1 + max_chunk, page_size)

    def running_pages(self, page_size: int) -> int:
        return self.max_pages(page_size, max_chunk=1) + 1

    def cached_pages(self, page_size: int) -> int:
        """Return how many pages of an idle prefix are worth keeping."""
        return self.max_pages(page_size, max_chunk=1) + 1

    def useful_pages(
        self,
        page_size: int,
        *,
        max_running: int,
        max_step_tokens: int,
        num_cached: int | None = None,
    ) -> int:
        """Return the pool size in pages above which more pages are useless, or ``UNBOUNDED``."""
        if self.window is None:
            return UNBOUNDED
        running = max_running * self.running_pages(page_size)
        step = self.max_pages(page_size, max_chunk=max_step_tokens)
        cached = max_running if num_cached is None else num_cached
        return running + cached * self.cached_pages(page_size) + step

    def table_pages(self, table: PageTable, num_tokens: int, *, max_chunk: int) -> int:
        """Return how many entries a table needs for ``num_tokens`` positions."""
        page_size = table.page_size
        if self.window is None:
            return pages_for(max(num_tokens, table.reserved_ahead), page_size)
        sink_pages = self.sink_pages(page_size)
        first = max(self.first_visible(table.num_written) // page_size, sink_pages)
        most = self.max_pages(page_size, max_chunk=max_chunk)
        ahead = min(pages_for(table.reserved_ahead, page_size), first - sink_pages + most)
        return max(pages_for(num_tokens, page_size), ahead)

    def publishable_pages(self, page_size: int) -> int:  # noqa: ARG002
        """Return how many of a sequence's first pages to publish."""
        return UNBOUNDED

    def sink_pages(self, page_size: int) -> int:
        """Return how many pages hold the first ``keep`` positions."""
        return pages_for(self.keep, page_size)

    def max_positions(self, page_size: int, *, max_chunk: int, num_pinned: int = 0) -> int:
        """Return the longest possible sequence, in positions, while ``num_pinned`` pages are pinned."""
        num_pages = self.num_pages - num_pinned
        bounded = self.max_pages(page_size, max_chunk=max_chunk) <= num_pages
        return UNBOUNDED if bounded else num_pages * page_size

    def decode_pages(self, num_tokens: int, page_size: int) -> int:
        """Return how many pages a sequence of ``num_tokens`` positions holds during decode."""
        return min(pages_for(num_tokens, page_size), self.max_pages(page_size, max_chunk=1))

    def needed_pages(self, num_pages: int, page_size: int) -> abc.Iterable[int]:
        """Yield the indices of the pages needed to continue after ``num_pages``, last first."""
        first = self.first_visible(num_pages * page_size) // page_size
        yield from range(num_pages - 1, first - 1, -1)
        yield from range(min(first, self.sink_pages(page_size)) - 1, -1, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention(KVGroupSpec):
    """Layers whose queries see every position before them."""

    window: None = field(init=False, default=None)
    keep: int = field(init=False, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(KVGroupSpec):
    """Layers whose queries see the last ``window`` positions (including their own) and the first ``keep``."""

    window: int

    def __post_init__(self) -> None:
        KVGroupSpec.__post_init__(self)
        if self.window < 1:
            raise ValueError(
                f"window must be at least 1, got {self.window}; use FullAttention for layers without a window"
            )
        if self.keep < 0:
            raise ValueError(f"keep must be at least 0, got {self.keep}; 0 keeps no first positions visible")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualWindow(SlidingWindow):
    """A window whose K and V are stored in 16 bits and also, in another group, quantized.

    KIVI and Hugging Face use this term. A query reads 16-bit pages in the window, quantized pages before it.

    residual_of      index of the quantized group
    outer_window     window of the quantized group (None: full attention)
    quantize_after   queries before this position read only 16-bit pages
    """

    residual_of: int
    outer_window: int | None = None
    quantize_after: int = 0

    def __post_init__(self) -> None:
        SlidingWindow.__post_init__(self)
        if self.outer_window is not None and self.window > self.outer_window:
            raise ValueError(
                f"a residual window must be at most its group's, {self.outer_window}, got {self.window}"
            )

    def window_at(self, position: int) -> int | None:
        return self.outer_window if position < self.quantize_after else self.window

    def widest_window(self) -> int:
        return max(self.window, min(self.quantize_after, self.outer_window or self.quantize_after))

    @property
    def context(self) -> str:
        return f"quantize_after {self.quantize_after}"

    def publishable_pages(self, page_size: int) -> int:
        if self.window != 1:
            return UNBOUNDED
        sink_pages = self.sink_pages(page_size)
        if self.outer_window == 1:
            return sink_pages
        return max(sink_pages, (self.quantize_after - 1) // page_size)

    def running_pages(self, page_size: int) -> int:
        return self.max_pages(page_size, max_chunk=1)

    def cached_pages(self, page_size: int) -> int:
        return self.sink_pages(page_size) + pages_for(self.widest_window() - 1, page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """Layers whose state has one size for any length of the sequence.

    num_slots        number of slots; a slot has the state of a running sequence, or a snapshot
    slot_bytes       bytes of a slot: the state of all these layers
    num_drafted      most slots for states after draft tokens (0: half of all slots)
    """

    num_slots: int
    slot_bytes: int
    every_page: bool = False
    tail: bool = True
    branch: bool = True
    demote_earlier: bool = True
    num_drafted: int = 0
    page_bytes: int = 1
    turn_pages: int = 1

    def __post_init__(self) -> None:
        if self.num_slots < 1:
            raise ValueError(
                f"num_slots must be at least 1, got {self.num_slots}; give recurrent states more memory"
            )

    @property
    def max_drafted(self) -> int:
        return self.num_drafted or self.num_slots // 2

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def needs_every_page(self) -> bool:
        """Always False, because a sequence needs only one snapshot to continue."""
        return False

    def needed_pages(self, num_pages: int, page_size: int) -> abc.Iterable[int]:  # noqa: ARG002
        yield from range(max(num_pages - 1, 0), num_pages)


def check_groups(specs: abc.Sequence[KVGroupSpec]) -> None:
    """Raise ValueError unless every residual window lies within the window of its quantized group."""
    for spec in specs:
        if not isinstance(spec, ResidualWindow):
            continue
        if not 0 <= spec.residual_of < len(specs) or isinstance(specs[spec.residual_of], ResidualWindow):
            raise ValueError(
                "residual_of must be the index of a group that is not itself a residual window, "
                f"got {spec.residual_of}"
            )
        outer = specs[spec.residual_of]
        if spec.outer_window != outer.window or (outer.window is not None and spec.keep != outer.keep):
            raise ValueError(
                f"the residual window of a group of window {outer.window}, keep {outer.keep} must name that "
                f"window and have the same keep, got outer_window {spec.outer_window}, keep {spec.keep}"
            )
