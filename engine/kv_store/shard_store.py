from __future__ import annotations

import threading
from collections import abc

from octavo.block_manager import BlockManager, Digest, PageId
from octavo.block_manager.digests import root
from octavo.scheduler import SchedulerOutput, Sequence, Status

from ..api.store_counters import StoreCounters, StoreCounts
from .page_runs import PagePart, PageRun
from .prefetch import FetchedPage, PrefetchJob
from .reader import ShardReader
from .remote import RemoteShards, Shards
from .transfer import PageAccess
from .writer import ShardWriter

QUEUE_BYTES = 256 * 1024**2  # bytes: limit of queued writes, and of prefetched pages
CLOSE_S = 10.0  # seconds to write queued pages at the end


class ShardStore:
    """Pages in a folder on disk or in a remote cache."""

    def __init__(self, folder: Shards, access: PageAccess, blocks: BlockManager) -> None:
        self.folder = folder
        self._page_bytes = folder.kind.part_bytes
        self._access = access
        self._blocks = blocks
        self._states = len(blocks.groups)
        blocks.miss_reasons.in_other_format = folder.has_of_other_kind
        self._counters = StoreCounters()
        self._writer = ShardWriter(folder, self._counters, queue_bytes=max(QUEUE_BYTES, *self._page_bytes, 0))
        self.reader = ShardReader(folder, self._counters, staged_bytes=QUEUE_BYTES)
        self._closing = threading.Event()
        self._index = threading.Thread(target=self._refresh, name="octavo-store-index", daemon=True)
        self._index.start()

    def counts(self) -> StoreCounts:
        return self._counters.read(self._writer.num_bytes)

    def used(self, digests: abc.Sequence[Digest]) -> None:
        self._writer.used(digests)

    def num_unwritten(self, token_ids: abc.Sequence[int], salt: bytes) -> int:
        digests, groups = self._blocks.page_digests(token_ids, [], salt=salt), range(len(self._page_bytes))
        return sum(self._writer.is_queued(digest, group) for digest in digests for group in groups)

    def start(self, job: PrefetchJob) -> bool:
        if self.reader.is_stuck:
            return False
        job.asks = self._may_ask(job)
        if not job.asks:
            if not job.gain(self.folder.has):
                self._counters.add("misses")
                return False
            if not self.reader.is_quicker(job):
                return False
            self._counters.add("hits")
        self.reader.start(job)
        return True

    def take(self, job: PrefetchJob, num_bytes: int) -> list[FetchedPage]:
        return self.reader.take(job, num_bytes)

    def loaded(self, num_new: int, num_bytes: int, seconds: float) -> None:  # noqa: ARG002
        self._counters.add("loaded", num_new)

    def cancel(self, job: PrefetchJob) -> None:
        self.reader.cancel(job)

    def offload(self, sequence: Sequence, token_s: float | None) -> None:  # noqa: ARG002
        last = min(sequence.num_written // self._blocks.page_size, len(sequence.digests))
        self._save(sequence, 0, last)
        if self._blocks.states is not None:
            self._save_states(sequence, 0, last, is_end=True)

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
        self.reader.close()
        self._writer.close(CLOSE_S)
        if isinstance(self.folder, RemoteShards):
            self._index.join(CLOSE_S)
            self.folder.close()

    def _refresh(self) -> None:
        while not self._closing.wait(self.folder.refresh_s):
            self.folder.refresh()

    def _may_ask(self, job: PrefetchJob) -> bool:
        if not isinstance(self.folder, RemoteShards) or self.folder.is_down:
            return False
        num_tokens = self._blocks.page_size * job.num_unreachable(self.folder.has)
        if not num_tokens or job.token_s is None:
            return num_tokens > 0
        return self.reader.ask_rate.is_within(1, num_tokens * job.token_s)

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
            wanted |= self._wanted(sequence, max(tail, last), tail + 1, self._states)
        if wanted:
            self._copy_out(sequence, wanted, self._states)

    def _save(self, sequence: Sequence, first: int, last: int) -> None:
        for group in range(self._states):
            wanted = self._wanted(sequence, first, last, group)
            if wanted:
                self._copy_out(sequence, wanted, group)

    def _wanted(self, sequence: Sequence, first: int, last: int, group: int) -> dict[int, PageId]:
        wanted: dict[int, PageId] = {}
        for index in range(first, last):
            digest = sequence.digests[index]
            page = self._blocks.find(digest, group)
            if page is None or self._writer.is_queued(digest, group) or self.folder.has(digest, group):
                continue
            if not self._writer.has_room(self._page_bytes[group] * (len(wanted) + 1)):
                self._counters.drop("queue_full")
                continue
            wanted[index] = page
        return wanted

    def _copy_out(self, sequence: Sequence, wanted: abc.Mapping[int, PageId], group: int) -> None:
        data = self._access.read_pages(list(wanted.values()), group)
        size, digests = self._blocks.page_size, sequence.digests
        for index, row in zip(wanted, data, strict=True):
            run = PageRun(
                self.folder.kind.group(group),
                digests[index - 1] if index else root(sequence.salt),
                tuple(sequence.tokens[index * size : (index + 1) * size]),
                (PagePart((0,), row[None]),),
            )
            self._writer.put(digests[index], group, run)
