"""Reading shards on a thread of its own: what comes back is in memory, and checked."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from octavo.block_manager import KVGroupSpec
from octavo.kernels.page_bytes import PageBytes

from ..api.store_counters import Tally
from .folder import ShardFolder
from .page_files import BadPages
from .prefetch import Fetch, FetchedPage

logger = logging.getLogger(__name__)


class ShardReader:
    """Reads one prompt after the other, ahead of whoever takes the pages, within a bound of bytes.

    groups   what the layers of each group of pages can see
    wake     called from the thread when there is something to take
    """

    def __init__(
        self,
        folder: ShardFolder,
        groups: Sequence[KVGroupSpec],
        tally: Tally,
        *,
        staged_bytes: int,
        wake: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._groups = groups
        self._tally = tally
        self._staged_bytes = staged_bytes
        self._wake = wake
        self._changed = threading.Condition()
        self._fetches: deque[Fetch] = deque()
        self._num_staged = 0
        self._closing = False
        self._thread = threading.Thread(target=self._main, name="octavo-store-reader", daemon=True)
        self._thread.start()

    def start(self, fetch: Fetch) -> None:
        """Read its pages, as many as let it go on farther."""
        with self._changed:
            self._fetches.append(fetch)
            self._changed.notify_all()

    def take(self, fetch: Fetch, num_bytes: int) -> list[FetchedPage]:
        """The next pages that are there, while they are fewer bytes than this, and then one more."""
        pages: list[FetchedPage] = []
        taken = 0
        while fetch.pages and taken < num_bytes:
            pages.append(fetch.pages.popleft())
            taken += pages[-1].data.nbytes
        self._release(taken)
        return pages

    def cancel(self, fetch: Fetch) -> None:
        """Nobody wants it any more."""
        with self._changed:
            fetch.cancelled = True
        while self.take(fetch, self._staged_bytes):
            pass

    def close(self, timeout: float) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _release(self, num_bytes: int) -> None:
        with self._changed:
            self._num_staged -= num_bytes
            self._changed.notify_all()

    def _main(self) -> None:
        while (fetch := self._next()) is not None:
            try:
                self._read_all(fetch)
            except Exception:  # a prompt whose pages cannot be read is computed
                self._tally.drop("read_failed")
                logger.exception("reading pages of a prompt failed")
            fetch.ended = True
            self._wake()

    def _next(self) -> Fetch | None:
        with self._changed:
            while not (self._fetches or self._closing):
                self._changed.wait()
            return None if self._closing else self._fetches.popleft()

    def _read_all(self, fetch: Fetch) -> None:
        """Whatever cannot be read is looked at as if it had never been there, and the rest is planned
        anew: a shorter beginning may need other pages."""
        while plan := fetch.plan(self._groups, self._folder.has):
            for group, index in plan:
                page = self._read(fetch, group, index)
                if page is None:
                    fetch.absent(group, index)
                    break
                if not self._stage(fetch, FetchedPage(group, index, page)):
                    return
                fetch.present(group, index)
                self._wake()

    def _read(self, fetch: Fetch, group: int, index: int) -> PageBytes | None:
        page_size = self._folder.kind.page_size
        tokens = tuple(fetch.tokens[index * page_size : (index + 1) * page_size])
        digest, parent = fetch.digests[index], fetch.parent(index)
        try:
            return self._folder.get(digest, parent=parent, token_ids=tokens, group=group)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tally.drop("read_failed")
            logger.warning("a page cannot be read from the cache folder: %s", error)
        except BadPages as error:
            self._tally.drop(error.reason)
            logger.warning("a page in the cache folder is dropped: %s", error)
        return None

    def _stage(self, fetch: Fetch, page: FetchedPage) -> bool:
        """Hand one page over when there is room; False if nobody wants it."""
        num_bytes = page.data.nbytes
        with self._changed:
            while self._num_staged and self._num_staged + num_bytes > self._staged_bytes:
                if fetch.cancelled or self._closing:
                    return False
                self._changed.wait()
            if fetch.cancelled or self._closing:
                return False
            self._num_staged += num_bytes
            fetch.pages.append(page)
            return True
