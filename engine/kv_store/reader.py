from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from octavo.kernels.page_bytes import PageBytes

from ..api.store_counters import StoreCounters
from .page_files import BadPages
from .prefetch import FetchedPage, Parts, PrefetchJob, Rate
from .remote import RemoteShards, Shards

logger = logging.getLogger(__name__)

STALL_S = 1.0  # seconds; a longer read of one page counts as hanging
WAIT_S = 10.0  # seconds that a prompt waits for its pages
MAX_STUCK = 2
CHECK_S = 0.1
CLOSE_S = 1.0


class _Worker:
    def __init__(self, run: Callable[[_Worker], None]) -> None:
        self.is_stuck = False
        self.fetch: PrefetchJob | None = None
        self.began: float | None = None
        self.thread = threading.Thread(target=run, args=(self,), name="octavo-store-reader", daemon=True)
        self.thread.start()


class ShardReader:
    """Reader of pages, on its own threads.

    A read that hangs for ``STALL_S`` seconds is abandoned, and another thread continues.
    """

    def __init__(
        self,
        folder: Shards,
        groups: Parts,
        counters: StoreCounters,
        *,
        staged_bytes: int,
        wake: Callable[[], None],
    ) -> None:
        self._rate, self.ask_rate = Rate(), Rate()
        self._folder = folder
        self._groups = groups
        self._counters = counters
        self._staged_bytes = staged_bytes
        self._wake = wake
        self._changed = threading.Condition()
        self._queue: deque[PrefetchJob] = deque()
        self._started: dict[PrefetchJob, float] = {}
        self._num_staged = 0
        self._num_stuck = 0
        self._closing = False
        self._worker: _Worker | None = _Worker(self._main)
        self._watch = threading.Thread(target=self._watch_disk, name="octavo-store-watch", daemon=True)
        self._watch.start()

    @property
    def is_stuck(self) -> bool:
        return self._worker is None

    def is_quicker(self, fetch: PrefetchJob) -> bool:
        """Whether reading a prompt's pages is expected to be faster than computing them."""
        if fetch.token_s is None:
            return True
        kind, has = self._folder.kind, self._folder.has
        num_bytes = sum(kind.part_bytes[group] for group, _ in fetch.plan(self._groups, has))
        gained = fetch.gain(self._groups, has) * kind.page_size
        return gained > 0 and self._rate.is_within(num_bytes, gained * fetch.token_s)

    def start(self, fetch: PrefetchJob) -> None:
        with self._changed:
            self._queue.append(fetch)
            self._started[fetch] = time.monotonic()
            self._changed.notify_all()

    def take(self, fetch: PrefetchJob, num_bytes: int) -> list[FetchedPage]:
        """Return the next pages, up to about ``num_bytes``."""
        pages: list[FetchedPage] = []
        taken = 0
        while fetch.pages and taken < num_bytes:
            pages.append(fetch.pages.popleft())
            taken += pages[-1].data.nbytes
        with self._changed:
            self._num_staged -= taken
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
            worker = self._worker
        if worker is not None:
            worker.thread.join(CLOSE_S)
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
                self._wake()

    def _give_up(self, now: float) -> bool:
        late = [fetch for fetch, since in self._started.items() if now - since > WAIT_S]
        worker = self._worker
        if worker is not None and worker.began is not None and now - worker.began > STALL_S:
            worker.is_stuck = True
            self._num_stuck += 1
            self._counters.drop("read_failed")
            logger.warning(
                "reading a page from %s has taken %g s; the page is computed instead",
                self._folder.place,
                STALL_S,
            )
            if worker.fetch is not None:
                late.append(worker.fetch)
            if self._num_stuck < MAX_STUCK:
                self._worker = _Worker(self._main)
            else:
                self._worker = None
                late += self._queue
                logger.warning("%s does not respond; no pages are read until it does", self._folder.place)
        for fetch in late:
            self._end(fetch)
        return bool(late)

    def _end(self, fetch: PrefetchJob) -> None:
        self._started.pop(fetch, None)
        fetch.ended = True
        if fetch in self._queue:
            self._queue.remove(fetch)

    def _main(self, worker: _Worker) -> None:
        while (fetch := self._next(worker)) is not None:
            try:
                self._read_all(fetch, worker)
            except Exception:  # the prompt is computed instead
                self._counters.drop("read_failed")
                logger.exception("reading the pages of a prompt from disk failed")
            with self._changed:
                worker.fetch = worker.began = None
                if worker.is_stuck and not self._come_back(worker):
                    return
                self._end(fetch)
            self._wake()

    def _come_back(self, worker: _Worker) -> bool:
        self._num_stuck -= 1
        if self._worker is not None:
            return False
        worker.is_stuck = False
        self._worker = worker
        return True

    def _next(self, worker: _Worker) -> PrefetchJob | None:
        with self._changed:
            while not (self._queue or self._closing):
                self._changed.wait()
            if self._closing:
                return None
            worker.fetch = self._queue.popleft()
            return worker.fetch

    def _ask(self, fetch: PrefetchJob, worker: _Worker) -> bool:
        assert isinstance(self._folder, RemoteShards)
        began = worker.began = time.monotonic()
        try:
            self._folder.ask(fetch.digests)
        except OSError:
            self._counters.drop("read_failed")
            return False
        worker.began = None
        self.ask_rate.observe(1, time.monotonic() - began)
        is_there = fetch.gain(self._groups, self._folder.has) > 0
        self._counters.add("hits" if is_there else "misses")
        return is_there and self.is_quicker(fetch)

    def _read_all(self, fetch: PrefetchJob, worker: _Worker) -> None:
        if fetch.asks and not self._ask(fetch, worker):
            return
        while plan := fetch.plan(self._groups, self._folder.has):
            for group, index in plan:
                if fetch.ended:
                    return
                began = worker.began = time.monotonic()
                page = self._read(fetch, group, index)
                worker.began = None
                if page is not None:
                    self._rate.observe(page.nbytes, time.monotonic() - began)
                if page is None:
                    fetch.absent(group, index)
                    break
                if not self._stage(fetch, FetchedPage(group, index, page)):
                    return
                fetch.present(group, index)
                self._wake()

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
