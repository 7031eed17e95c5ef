"""Device memory that one launch moves, to be compared with an algorithm's minimum.

Example: all lanes of a simdgroup load one value of 4 bytes.

thread_bytes   128: the sum over lanes
bytes          4: the distinct bytes of one execution by a simdgroup
unique_bytes   4: the distinct bytes of the launch, which an infinite cache would fetch
lines          128-byte lines that an execution touches
min_lines      lines that the distinct bytes would fill; equals ``lines`` if accesses coalesce perfectly
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from metal_emulator.build import source_lines


@dataclass(frozen=True, kw_only=True)
class Site:
    """One load or store instruction on one buffer, summed over all simdgroups."""

    library: Path
    offset: int
    buffer: str
    is_write: bool
    executions: int
    thread_bytes: int
    bytes: int
    lines: int
    min_lines: int

    @property
    def where(self) -> str:
        """Source line as "kernel:line"."""
        return source_lines(self.library, self.offset)


@dataclass(frozen=True, kw_only=True)
class Count:
    thread_bytes: int = 0
    bytes: int = 0
    unique_bytes: int = 0
    lines: int = 0
    min_lines: int = 0

    @property
    def line_ratio(self) -> float:
        """Lines touched divided by lines needed: 1.0 if fully coalesced, or if nothing was touched."""
        return self.lines / self.min_lines if self.min_lines else 1.0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Counts by buffer name, in the signature's order; `x_shape` and `x_strides` are buffers, too."""

    reads: Mapping[str, Count]
    writes: Mapping[str, Count]
    sites: tuple[Site, ...]

    @property
    def bytes_read(self) -> int:
        return sum(count.bytes for count in self.reads.values())

    @property
    def bytes_written(self) -> int:
        return sum(count.bytes for count in self.writes.values())

    def read(self, *buffers: str) -> Count:
        """Return the sum of the reads of these buffers. Raises KeyError for unknown names."""
        return _total(self.reads[name] for name in buffers)

    def written(self, *buffers: str) -> Count:
        """Return the sum of the writes to these buffers. Raises KeyError for unknown names."""
        return _total(self.writes[name] for name in buffers)


def make_traffic(sites: Iterable[Site], unique: Mapping[str, tuple[int, int]]) -> Traffic:
    sites = tuple(sites)

    def of(name: str, *, is_write: bool) -> Count:
        mine = [site for site in sites if site.buffer == name and site.is_write == is_write]
        return Count(
            thread_bytes=sum(site.thread_bytes for site in mine),
            bytes=sum(site.bytes for site in mine),
            unique_bytes=unique[name][is_write],
            lines=sum(site.lines for site in mine),
            min_lines=sum(site.min_lines for site in mine),
        )

    return Traffic(
        reads={name: of(name, is_write=False) for name in unique},
        writes={name: of(name, is_write=True) for name in unique},
        sites=sites,
    )


def _total(counts: Iterable[Count]) -> Count:
    counts = tuple(counts)
    return Count(
        thread_bytes=sum(count.thread_bytes for count in counts),
        bytes=sum(count.bytes for count in counts),
        unique_bytes=sum(count.unique_bytes for count in counts),
        lines=sum(count.lines for count in counts),
        min_lines=sum(count.min_lines for count in counts),
    )
