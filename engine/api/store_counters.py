from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

DROP_REASONS = (
    "queue_full", "write_failed", "read_failed", "read_slow", "torn", "altered", "foreign", "budget",
)  # fmt: skip
"""Reasons why a page was not written to disk, not read, or is no longer there:

queue_full                 it was not written, because the disk is slower than the engine
write_failed, read_failed  the system reported an error; the operation is not retried
read_slow                  counts prompts: one waited too long for its pages, so the rest was computed
torn, altered, foreign     the file's contents differ from those written (see page_files.BadPages)
budget                     it was evicted, because other pages were used more recently
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCounts:
    """Counters of the page store since the start. DROP_REASONS lists the keys of ``dropped``."""

    hits: int = 0
    misses: int = 0
    loaded: int = 0
    written: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    num_bytes: int = 0


class StoreCounters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def drop(self, reason: str, count: int = 1) -> None:
        assert reason in DROP_REASONS, reason
        with self._lock:
            self._dropped[reason] += count

    def read(self, num_bytes: int) -> StoreCounts:
        with self._lock:
            return StoreCounts(**self._counts, dropped=dict(+self._dropped), num_bytes=num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCounts:
    num_out: int = 0
    num_in: int = 0
    num_bytes: int = 0
