"""Thread that writes shards, so that steps never wait for a disk."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.block_manager import Digest

from ..api.store_counters import StoreCounters
from .page_runs import PageRun
from .remote import Shards

logger = logging.getLogger(__name__)

MAX_QUEUED = 65_536
MAX_USES = 65_536
FULL_DISK_S = 1.0  # seconds between prunings of a full disk
STALL_S = 2.0
COUNTS_PER_BUDGET = 16


@dataclass(frozen=True, slots=True)
class _Page:
    digest: Digest
    group: int
    run: PageRun


class ShardWriter:
    def __init__(self, folder: Shards, counters: StoreCounters, *, queue_bytes: int) -> None:
        self._folder = folder
        self._counters = counters
        self._queue_bytes = queue_bytes
        self._changed = threading.Condition()
        self._pages: deque[_Page] = deque()
        self._uses: deque[Digest] = deque()
        self._queued: set[tuple[Digest, int]] = set()
        self._num_queued = 0  # bytes in the queue
        self._closing = False
        self._failing = False
        self._next_prune = 0.0
        self._num_done = 0
        self._uncounted = 0
        self.num_bytes = 0
        self._thread = threading.Thread(target=self._main, name="octavo-store-writer", daemon=True)
        self._thread.start()

    def is_queued(self, digest: Digest, group: int) -> bool:
        return (digest, group) in self._queued

    def has_room(self, num_bytes: int) -> bool:
        return self._num_queued + num_bytes <= self._queue_bytes and len(self._pages) < MAX_QUEUED

    def put(self, digest: Digest, group: int, run: PageRun) -> None:
        with self._changed:
            self._queued.add((digest, group))
            self._num_queued += run.parts[0].pages.nbytes
            self._pages.append(_Page(digest, group, run))
            self._changed.notify_all()

    def used(self, digests: Sequence[Digest]) -> None:
        with self._changed:
            self._uses.extend(digests[: max(0, MAX_USES - len(self._uses))])
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Write queued pages for at most ``timeout`` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        end, num_done = time.monotonic() + timeout, -1
        while self._thread.is_alive() and time.monotonic() < end and self._num_done != num_done:
            num_done = self._num_done
            self._thread.join(max(0.0, min(STALL_S, end - time.monotonic())))
        with self._changed:
            self._counters.drop("queue_full", len(self._pages))
            self._pages.clear()

    def _main(self) -> None:
        self._prune()
        while (page := self._next()) is not None:
            self._write(page)

    def _next(self) -> _Page | None:
        while True:
            with self._changed:
                while not (self._pages or self._uses or self._closing):
                    self._changed.wait()
                if self._pages:
                    return self._pages.popleft()
                if not self._uses:
                    return None
                uses, self._uses = self._uses, deque()
            for digest in dict.fromkeys(uses):
                self._folder.touch(digest)

    def _write(self, page: _Page) -> None:
        try:
            num_bytes = self._folder.put(page.digest, page.run, page.group)
        except OSError as error:
            self._counters.drop("write_failed")
            if not self._failing:
                logger.warning("pages cannot be written to %s: %s", self._folder.place, error)
            self._failing = True
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and time.monotonic() >= self._next_prune:
                self._next_prune = time.monotonic() + FULL_DISK_S
                self._prune(is_full=True)
        else:
            self._failing = False
            self._counters.add("written")
            self.num_bytes += num_bytes
            self._uncounted += num_bytes
        with self._changed:
            self._queued.discard((page.digest, page.group))
            self._num_queued -= page.run.parts[0].pages.nbytes
            self._num_done += 1
        budget = self._folder.max_bytes
        if self.num_bytes > budget or self._uncounted * COUNTS_PER_BUDGET > budget:
            self._prune()

    def _prune(self, *, is_full: bool = False) -> None:
        pruned = self._folder.prune(is_full=is_full)
        self.num_bytes, self._uncounted = pruned.num_bytes, 0
        if pruned.num_removed:
            self._counters.drop("budget", pruned.num_removed)
