"""Reading shards on a thread of its own: what comes back is in memory, and checked."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from octavo.block_manager import Digest
from octavo.engine.store.counts import Tally
from octavo.engine.store.folder import ShardFolder
from octavo.engine.store.page_files import BadPages
from octavo.kernels.page_bytes import PageBytes

logger = logging.getLogger(__name__)


class Fetch:
    """Consecutive pages of one prompt, on their way from disk.

    tokens     of the whole prompt
    digests    of its pages, as many as could be wanted
    root       digest that stands before the first page
    first      index of the first page that is to come
    """

    def __init__(self, tokens: list[int], digests: list[Digest], *, root: Digest, first: int) -> None:
        self.tokens = tokens
        self.digests = digests
        self.root = root
        self.first = first
        self.pages: deque[PageBytes] = deque()  # read and not yet taken
        self.ended = False  # nothing comes any more
        self.cancelled = False

    def parent(self, index: int) -> Digest:
        return self.digests[index - 1] if index else self.root


class ShardReader:
    """Reads one prompt after the other, ahead of whoever takes the pages, within a bound of bytes.

    wake   called from the thread when there is something to take
    """

    def __init__(
        self, folder: ShardFolder, tally: Tally, *, staged_bytes: int, wake: Callable[[], None]
    ) -> None:
        self._folder = folder
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
        """Read its pages until one is not there."""
        with self._changed:
            self._fetches.append(fetch)
            self._changed.notify_all()

    def take(self, fetch: Fetch, max_pages: int) -> list[PageBytes]:
        """The next pages that are there, at most so many."""
        pages: list[PageBytes] = []
        while fetch.pages and len(pages) < max_pages:
            pages.append(fetch.pages.popleft())
        self._release(sum(page.nbytes for page in pages))
        return pages

    def cancel(self, fetch: Fetch) -> None:
        """Nobody wants it any more."""
        with self._changed:
            fetch.cancelled = True
        self.take(fetch, len(fetch.digests))

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
        for index in range(fetch.first, len(fetch.digests)):
            page = self._read(fetch, index)
            if page is None or not self._stage(fetch, page):
                return
            self._wake()

    def _read(self, fetch: Fetch, index: int) -> PageBytes | None:
        page_size = self._folder.kind.spec.page_size
        tokens = tuple(fetch.tokens[index * page_size : (index + 1) * page_size])
        try:
            return self._folder.get(fetch.digests[index], parent=fetch.parent(index), token_ids=tokens)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tally.drop("read_failed")
            logger.warning("a page cannot be read from the cache folder: %s", error)
        except BadPages as error:
            self._tally.drop(error.reason)
            logger.warning("a page in the cache folder is dropped: %s", error)
        return None

    def _stage(self, fetch: Fetch, page: PageBytes) -> bool:
        """Hand one page over when there is room; False if nobody wants it."""
        with self._changed:
            while self._num_staged and self._num_staged + page.nbytes > self._staged_bytes:
                if fetch.cancelled or self._closing:
                    return False
                self._changed.wait()
            if fetch.cancelled or self._closing:
                return False
            self._num_staged += page.nbytes
            fetch.pages.append(page)
            return True
