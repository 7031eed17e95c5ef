from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from octavo.kernels.page_bytes import PageBytes

from ..api.store_counters import StoreCounters
from .page_files import BadPages
from .prefetch import FetchedPage, PrefetchJob, Rate
from .remote import RemoteShards, Shards

logger = logging.getLogger(__name__)

STALL_S = 1.0  # seconds; a longer read of one page counts as hanging
WAIT_S = 10.0  # seconds that a prompt waits for its pages
CHECK_S = 0.1
CLOSE_S = 1.0


class ShardReader:
    """Reader of pages, on its own thread.

    While a read hangs for more than ``STALL_S`` seconds, no pages are read (``is_stuck``).
    """

    def __init__(
        self,
        folder: Shards,
        counters: StoreCounters,
        *,
        staged_bytes: int,
    ) -> None:
        self._rate, self.ask_rate = Rate(), Rate()
        self._folder = folder
        self._counters = counters
        self._staged_bytes = staged_bytes
        self.wake: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._queue: deque[PrefetchJob] = deque()
        self._started: dict[PrefetchJob, float] = {}
        self._num_staged = 0
        self.is_stuck = False
        self._read_began: float | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._main, name="octavo-store-reader", daemon=True)
        self._thread.start()
        self._watch = threading.Thread(target=self._watch_disk, name="octavo-store-watch", daemon=True)
        self._watch.start()

    def is_quicker(self, fetch: PrefetchJob) -> bool:
        return fetch.is_quicker(self._folder.has, self._folder.kind.part_bytes, self._rate)

    def start(self, fetch: PrefetchJob) -> None:
        with self._changed:
            self._queue.append(fetch)
            self._started[fetch] = time.monotonic()
            self._changed.notify_all()

    def take(self, fetch: PrefetchJob, num_bytes: int) -> list[FetchedPage]:
        pages = fetch.take(num_bytes)
        with self._changed:
            self._num_staged -= sum(page.data.nbytes for page in pages)
            self._changed.notify_all()
        return pages

    def cancel(self, fetch: PrefetchJob) -> None:
        with self._changed:
            self._end(fetch)
        while self.take(fetch, self._staged_bytes):
            pass

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if not self.is_stuck:
            self._thread.join(CLOSE_S)
        self._watch.join(CLOSE_S)

    def _watch_disk(self) -> None:
        while True:
            with self._changed:
                while not (self._started or self._closing):
                    self._changed.wait()
                if self._closing:
                    return
                has_given_up = self._give_up(time.monotonic())
                if not has_given_up:
                    self._changed.wait(CHECK_S)
            if has_given_up:
                self.wake()

    def _give_up(self, now: float) -> bool:
        late = [fetch for fetch, since in self._started.items() if now - since > WAIT_S]
        self._counters.drop("read_slow", len(late))
        began = self._read_began
        if began is not None and now - began > STALL_S and not self.is_stuck:
            self.is_stuck = True
            self._counters.drop("read_failed")
            logger.warning(
                "reading a page from %s has taken %g s; no pages are read until it responds",
                self._folder.place,
                STALL_S,
            )
            late += self._started
        for fetch in late:
            self._end(fetch)
        return bool(late)

    def _end(self, fetch: PrefetchJob) -> None:
        self._started.pop(fetch, None)
        fetch.ended = True
        if fetch in self._queue:
            self._queue.remove(fetch)

    def _main(self) -> None:
        while (fetch := self._next()) is not None:
            try:
                self._read_all(fetch)
            except Exception:  # the prompt is computed instead
                self._counters.drop("read_failed")
                logger.exception("reading the pages of a prompt from disk failed")
            with self._changed:
                self._read_began, self.is_stuck = None, False
                self._end(fetch)
            self.wake()

    def _next(self) -> PrefetchJob | None:
        with self._changed:
            while not (self._queue or self._closing):
                self._changed.wait()
            return None if self._closing else self._queue.popleft()

    def _ask(self, fetch: PrefetchJob) -> bool:
        assert isinstance(self._folder, RemoteShards)
        began = self._read_began = time.monotonic()
        try:
            self._folder.ask(fetch.digests)
        except OSError:
            self._counters.drop("read_failed")
            return False
        self._read_began = None
        self.ask_rate.observe(1, time.monotonic() - began)
        if not fetch.gain(self._folder.has):
            self._counters.add("misses")
            return False
        if not self.is_quicker(fetch):
            return False
        self._counters.add("hits")
        return True

    def _ask_for_waiting(self) -> None:
        """Ask for the prompts in the queue, so that one without stored pages waits for no other's."""
        with self._changed:
            waiting = [fetch for fetch in self._queue if fetch.asks]
        for fetch in waiting:
            is_there = self._ask(fetch)
            self._read_began, fetch.asks = None, False
            if not is_there:
                with self._changed:
                    self._end(fetch)
                self.wake()

    def _read_all(self, fetch: PrefetchJob) -> None:
        if fetch.asks and not self._ask(fetch):
            return
        while plan := fetch.plan(self._folder.has):
            for group, index in plan:
                self._ask_for_waiting()
                if fetch.ended:
                    return
                began = self._read_began = time.monotonic()
                page = self._read(fetch, group, index)
                self._read_began = None
                if page is not None:
                    self._rate.observe(page.nbytes, time.monotonic() - began)
                if page is None:
                    fetch.absent(group, index)
                    break
                if not self._stage(fetch, FetchedPage(group, index, page)):
                    return
                fetch.present(group, index)
                self.wake()

    def _read(self, fetch: PrefetchJob, group: int, index: int) -> PageBytes | None:
        page_size = self._folder.kind.page_size
        tokens = tuple(fetch.tokens[index * page_size : (index + 1) * page_size])
        digest, parent = fetch.digests[index], fetch.parent(index)
        try:
            return self._folder.get(digest, parent=parent, token_ids=tokens, group=group)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._counters.drop("read_failed")
            logger.warning("a page cannot be read from %s: %s", self._folder.place, error)
        except BadPages as error:
            self._counters.drop(error.reason)
            logger.warning("an invalid page in %s is ignored: %s", self._folder.place, error)
        self._folder.recheck(fetch.digests[index + 1 :], group)
        return None

    def _stage(self, fetch: PrefetchJob, page: FetchedPage) -> bool:
        num_bytes = page.data.nbytes
        with self._changed:
            while self._num_staged and self._num_staged + num_bytes > self._staged_bytes:
                if fetch.ended or self._closing:
                    return False
                self._changed.wait()
            if fetch.ended or self._closing:
                return False
            self._num_staged += num_bytes
            fetch.pages.append(page)
            return True
