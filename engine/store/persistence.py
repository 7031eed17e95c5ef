"""The persistent tier as the engine's thread sees it: published pages are copied out for the
writer, and prompts whose pages are on disk wait until the reader has brought them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from octavo.block_manager import BlockManager
from octavo.block_manager.digests import root
from octavo.engine.errors import InvalidConfig, NotConfigured
from octavo.engine.store.counts import StoreCounts, Tally
from octavo.engine.store.folder import ShardFolder
from octavo.engine.store.page_files import PageRun
from octavo.engine.store.reader import Fetch, ShardReader
from octavo.engine.store.transfer import PageAccess, PageTransfer
from octavo.engine.store.writer import ShardWriter
from octavo.kernels.page_bytes import PageBytes
from octavo.scheduler import Sequence, Step

QUEUE_BYTES = 256 * 1024**2  # of pages that wait to be written, and as many that were read
STEP_BYTES = 64 * 1024**2  # put into the pool per step
CLOSE_S = 10.0  # what is queued may be written that long at the end


class Persistence:
    """Belongs to the engine's thread, except ``counts``.

    wake   called from another thread when ``has_news`` has become true
    """

    wake: Callable[[], None]

    def __init__(
        self,
        root_folder: Path,
        access: PageAccess,
        blocks: BlockManager,
        transfer: PageTransfer,
        *,
        max_bytes: int,
    ) -> None:
        """Raises OSError if the folder cannot be used, and InvalidConfig for page groups."""
        try:
            transfer.check()
        except NotConfigured as error:
            raise InvalidConfig(f"{error}; leave cache_dir out") from None
        self._access = access
        self._transfer = transfer
        self._blocks = blocks
        self._kind = access.page_kind
        self._page_bytes = self._kind.spec.page_bytes
        self._folder = ShardFolder(root_folder, self._kind, max_bytes=max_bytes)
        blocks.misses.in_other_format = self._folder.has_of_other_kind
        self._tally = Tally()
        self.wake = _nobody
        self._writer = ShardWriter(self._folder, self._tally, queue_bytes=QUEUE_BYTES)
        self._reader = ShardReader(self._folder, self._tally, staged_bytes=QUEUE_BYTES, wake=self._news)
        self._fetches: dict[Sequence, Fetch] = {}

    @property
    def num_waiting(self) -> int:
        """Sequences whose pages are being read, their siblings included."""
        return sum(1 + len(sequence.siblings) for sequence in self._fetches)

    @property
    def has_news(self) -> bool:
        """Whether ``advance`` would do something."""
        return any(fetch.pages or fetch.ended for fetch in self._fetches.values())

    def counts(self) -> StoreCounts:
        return self._tally.read(self._writer.num_bytes)

    def fetch(self, sequence: Sequence) -> bool:
        """Whether to wait for pages of this prompt that are on disk: until ``advance`` returns it."""
        if sequence.recompute:
            return False
        blocks = self._blocks
        digests = blocks.name_pages(sequence.tokens, sequence.digests, salt=sequence.salt)
        self._writer.used(digests)
        first = next((i for i, digest in enumerate(digests) if blocks.find(digest) is None), len(digests))
        if first == len(digests):
            return False
        if not self._folder.has(digests[first]):
            self._tally.add("misses")
            return False
        self._tally.add("hits")
        fetch = Fetch(list(sequence.tokens), list(digests), root=root(sequence.salt), first=first)
        self._fetches[sequence] = fetch
        self._reader.start(fetch)
        return True

    def cancel(self, sequence: Sequence) -> bool:
        """Forget a sequence that waits; False if it does not."""
        fetch = self._fetches.pop(sequence, None)
        if fetch is None:
            return False
        self._reader.cancel(fetch)
        return True

    def advance(self) -> list[Sequence]:
        """Put pages that were read into the pool, a bounded number; the sequences that need wait
        no longer, in the order they came."""
        budget = max(1, STEP_BYTES // self._page_bytes)
        ready = []
        for sequence, fetch in self._fetches.items():
            ended = fetch.ended  # before looking, because pages may come in between
            pages = self._reader.take(fetch, budget)
            budget -= len(pages)
            if (pages and not self._adopt(sequence, fetch, pages)) or (ended and not fetch.pages):
                ready.append(sequence)
        for sequence in ready:
            self.cancel(sequence)
        return ready

    def keep(self, step: Step) -> None:
        """Copy out what a committed step has published and what is not on disk."""
        page_size = self._blocks.page_size
        for sequence, start, stop, _, _ in step.work:
            first, last = start // page_size, stop // page_size
            if first < last:
                self._keep(sequence, first, min(last, len(sequence.digests)))

    def close(self) -> None:
        """Write what is queued, within some seconds, and end the threads."""
        self._reader.close(CLOSE_S)
        self._writer.close(CLOSE_S)

    def _news(self) -> None:
        self.wake()

    def _keep(self, sequence: Sequence, first: int, last: int) -> None:
        digests, blocks, writer = sequence.digests, self._blocks, self._writer
        wanted: list[tuple[int, int]] = []  # index in the sequence, page
        for index in range(first, last):
            digest = digests[index]
            page = blocks.find(digest)
            if page is None or writer.is_queued(digest) or self._folder.has(digest):
                continue
            if not writer.has_room(self._page_bytes * (len(wanted) + 1)):
                self._tally.drop("queue_full")
                continue
            wanted.append((index, page))
        if not wanted:
            return
        data = self._access.read_pages([page for _, page in wanted])
        size = blocks.page_size
        for (index, _), row in zip(wanted, data, strict=True):
            run = PageRun(
                self._kind,
                digests[index - 1] if index else root(sequence.salt),
                tuple(sequence.tokens[index * size : (index + 1) * size]),
                row[None],
            )
            writer.put(digests[index], run)

    def _adopt(self, sequence: Sequence, fetch: Fetch, pages: list[PageBytes]) -> bool:
        """Put a prompt's next pages into the pool, where they are cached and held by nobody; False
        if it goes no further: there is no room, or what comes before is gone."""
        inserted = self._transfer.insert(
            fetch.tokens, np.stack(pages), sequence.salt, first=fetch.first, digests=list(fetch.digests)
        )
        self._tally.add("loaded", inserted.num_new)
        fetch.first += len(pages)
        return not inserted.num_skipped


def _nobody() -> None:
    """Nobody waits: the core is stepped by hand."""
