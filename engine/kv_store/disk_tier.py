"""A ``KVConnector`` that keeps pages in a folder on disk or in a remote cache."""

from __future__ import annotations

import threading
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass

from octavo.block_manager import BlockManager, Digest
from octavo.block_manager.digests import root
from octavo.scheduler import SchedulerOutput, Sequence, Status

from ..api.store_counters import StoreCounters, StoreCounts
from .page_runs import PagePart, PageRun
from .prefetch import PrefetchJob, adopt
from .reader import ShardReader
from .remote import RemoteShards, Shards
from .transfer import PageAccess, PageTransfer
from .writer import ShardWriter

QUEUE_BYTES = 256 * 1024**2  # bytes: limit of queued writes, and of prefetched pages
STEP_BYTES = 64 * 1024**2  # bytes of prefetched pages that one step inserts
CLOSE_S = 10.0  # seconds to write queued pages at the end


class DiskTier:
    """Pages on disk. Used only on the engine's thread, except for ``counts``."""

    def __init__(
        self,
        folder: Shards,
        access: PageAccess,
        blocks: BlockManager,
        transfer: PageTransfer,
    ) -> None:
        self._access = access
        self._transfer = transfer
        self._blocks = blocks
        self._kind = access.page_layout_key
        self._page_bytes = self._kind.part_bytes
        self._states = len(blocks.groups)
        self._folder = folder
        blocks.miss_reasons.in_other_format = self._folder.has_of_other_kind
        self._counters = StoreCounters()
        self._wake = _do_nothing
        queue_bytes = max(QUEUE_BYTES, *self._page_bytes, 0)
        self._writer = ShardWriter(self._folder, self._counters, queue_bytes=queue_bytes)
        self._reader = ShardReader(
            self._folder, blocks.parts, self._counters, staged_bytes=QUEUE_BYTES, wake=self._news
        )
        self._fetches: dict[Sequence, PrefetchJob] = {}
        self._closing = threading.Event()
        self._index = threading.Thread(target=self._refresh, name="octavo-store-index", daemon=True)
        self._index.start()

    saves_steps = True

    @property
    def has_updates(self) -> bool:
        return any(fetch.pages or fetch.ended for fetch in self._fetches.values())

    def on_update(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def counts(self) -> StoreCounts:
        return self._counters.read(self._writer.num_bytes)

    def start_load(self, sequence: Sequence, /, *, token_s: float | None = None) -> bool:
        if self._reader.is_stuck:
            return False
        blocks = self._blocks
        digests = blocks.page_digests(
            sequence.tokens, sequence.digests, salt=sequence.salt, media=sequence.media
        )
        self._writer.used(digests)
        found = blocks.num_findable(digests)
        if found == len(digests):
            return False
        fetch = PrefetchJob.of(sequence, blocks, token_s)
        fetch.asks = self._may_ask(digests[found:], token_s)
        if not fetch.asks:
            if not self._may_be_there(digests, fetch.known, found):
                self._counters.add("misses")
                return False
            if not self._reader.is_quicker(fetch):
                return False
            self._counters.add("hits")
        self._fetches[sequence] = fetch
        self._reader.start(fetch)
        return True

    def offload(self, sequence: Sequence, token_s: float | None) -> None:  # noqa: ARG002
        last = min(sequence.num_written // self._blocks.page_size, len(sequence.digests))
        self._save(sequence, 0, last)
        if self._blocks.states is not None:
            self._save_states(sequence, 0, last, is_end=True)

    def cancel_load(self, sequence: Sequence) -> None:
        self._reader.cancel(self._fetches.pop(sequence))

    def poll(self) -> list[Sequence]:
        budget = STEP_BYTES
        ready = []
        for sequence, fetch in self._fetches.items():
            ended = fetch.ended
            pages = self._reader.take(fetch, budget)
            budget -= sum(page.data.nbytes for page in pages)
            num_new, goes_on = adopt(self._transfer, fetch, pages, sequence.salt)
            self._counters.add("loaded", num_new)
            if not goes_on or (ended and not fetch.pages):
                ready.append(sequence)
        for sequence in ready:
            self.cancel_load(sequence)
        return ready

    def save(self, step: SchedulerOutput) -> None:
        page_size = self._blocks.page_size
        for item in step.work:
            sequence = item.sequence
            first, last = item.start // page_size, item.end // page_size
            last = min(last, len(sequence.digests))  # a page filled by rejected drafts has no digest
            if first < last:
                self._save(sequence, first, last)
            if self._blocks.states is not None:
                self._save_states(sequence, first, last)

    def close(self) -> None:
        self._closing.set()
        self._reader.close()
        self._writer.close(CLOSE_S)
        if isinstance(self._folder, RemoteShards):
            self._index.join(CLOSE_S)
            self._folder.close()

    def _refresh(self) -> None:
        while not self._closing.wait(self._folder.refresh_s):
            self._folder.refresh()

    def _news(self) -> None:
        self._wake()

    def _may_ask(self, missing: abc.Sequence[Digest], token_s: float | None) -> bool:
        if not isinstance(self._folder, RemoteShards) or self._folder.is_down:
            return False
        num_tokens = self._blocks.page_size * sum(not self._folder.has(digest) for digest in missing)
        if not num_tokens or token_s is None:
            return num_tokens > 0
        return self._reader.ask_rate.is_within(1, num_tokens * token_s)

    def _may_be_there(
        self, digests: abc.Sequence[Digest], known: abc.Sequence[abc.Sequence[bool]], found: int
    ) -> bool:
        for states in known[self._states :]:
            indices = range(found, len(digests))
            if not any(states[i] or self._folder.has(digests[i], self._states) for i in indices):
                return False
        for group, pages in enumerate(known[: self._states]):
            missing = next((index for index in range(found, len(digests)) if not pages[index]), None)
            if missing is not None:
                return self._folder.has(digests[missing], group)
        return True

    def _save_states(self, sequence: Sequence, first: int, last: int, *, is_end: bool = False) -> None:
        assert self._blocks.states is not None
        if not self._blocks.states.every_page:
            last = min(last, sequence.num_prompt // self._blocks.page_size)
        wanted = self._wanted(sequence, first, last, self._states)
        if is_end or sequence.status is Status.FINISHED:
            indices = range(len(sequence.digests) - 1, -1, -1)
            tail = next(
                (i for i in indices if self._blocks.find(sequence.digests[i], self._states) is not None), -1
            )
            wanted += self._wanted(sequence, max(tail, last), tail + 1, self._states)
        if wanted:
            self._copy_out(sequence, wanted, self._states)

    def _save(self, sequence: Sequence, first: int, last: int) -> None:
        for group in range(self._states):
            wanted = self._wanted(sequence, first, last, group)
            if wanted:
                self._copy_out(sequence, wanted, group)

    def _wanted(self, sequence: Sequence, first: int, last: int, group: int) -> list[_MissingPage]:
        wanted: list[_MissingPage] = []
        for index in range(first, last):
            digest = sequence.digests[index]
            page = self._blocks.find(digest, group)
            if page is None or self._writer.is_queued(digest, group) or self._folder.has(digest, group):
                continue
            if not self._writer.has_room(self._page_bytes[group] * (len(wanted) + 1)):
                self._counters.drop("queue_full")
                continue
            wanted.append(_MissingPage(index, page))
        return wanted

    def _copy_out(self, sequence: Sequence, wanted: list[_MissingPage], group: int) -> None:
        data = self._access.read_pages([each.page for each in wanted], group)
        size, digests = self._blocks.page_size, sequence.digests
        for index, row in zip((each.index for each in wanted), data, strict=True):
            run = PageRun(
                self._kind.group(group),
                digests[index - 1] if index else root(sequence.salt),
                tuple(sequence.tokens[index * size : (index + 1) * size]),
                (PagePart((0,), row[None]),),
            )
            self._writer.put(digests[index], group, run)


@dataclass(frozen=True, slots=True)
class _MissingPage:
    index: int
    page: int


def _do_nothing() -> None: ...
