from __future__ import annotations

import time
from collections.abc import Callable

from octavo.block_manager import BlockManager
from octavo.scheduler import KVConnector, SchedulerOutput, Sequence

from .host_memory import HostMemory
from .prefetch import PrefetchJob, adopt
from .shard_store import ShardStore
from .transfer import PageTransfer

STEP_BYTES = 64 * 1024**2  # bytes of pages that one step loads


class PageStore(KVConnector):
    """Pages in host memory, and in shards on disk or in a remote cache. Used only on the engine's thread.

    Preempted sequences are copied to host memory, if there is any. Shards get every published page.
    """

    def __init__(
        self,
        blocks: BlockManager,
        transfer: PageTransfer,
        *,
        host: HostMemory | None = None,
        shards: ShardStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host, self.shards = host, shards
        self._media = [medium for medium in (host, shards) if medium is not None]
        self._blocks = blocks
        self._transfer = transfer
        self._clock = clock
        self._jobs: dict[Sequence, tuple[PrefetchJob, HostMemory | ShardStore]] = {}

    @property
    def saves_steps(self) -> bool:
        return self.shards is not None

    @property
    def has_updates(self) -> bool:
        return any(job.pages or job.ended for job, _ in self._jobs.values())

    def on_update(self, wake: Callable[[], None]) -> None:
        if self.shards is not None:
            self.shards.reader.wake = wake

    def offload(self, sequence: Sequence, token_s: float | None) -> None:
        for medium in self._media[:1]:
            medium.offload(sequence, token_s)

    def start_load(self, sequence: Sequence, /, *, token_s: float | None = None) -> bool:
        for medium in self._media:
            job = PrefetchJob(sequence, self._blocks, token_s)
            medium.used(job.digests)
            if job.missing and medium.start(job):
                self._jobs[sequence] = job, medium
                return True
        return False

    def cancel_load(self, sequence: Sequence) -> None:
        job, medium = self._jobs.pop(sequence)
        medium.cancel(job)

    def poll(self) -> list[Sequence]:
        budget, ready = STEP_BYTES, []
        for sequence, (job, medium) in self._jobs.items():
            ended = job.ended
            pages = medium.take(job, budget)
            num_bytes = sum(page.data.nbytes for page in pages)
            budget -= num_bytes
            began = self._clock()
            num_new, goes_on = adopt(self._transfer, job, pages, sequence.salt)
            medium.loaded(num_new, num_bytes, self._clock() - began)
            if not goes_on or (ended and not job.pages):
                ready.append(sequence)
        for sequence in ready:
            self.cancel_load(sequence)
        return ready

    def save(self, step: SchedulerOutput) -> None:
        if self.shards is not None:
            self.shards.save(step)

    def close(self) -> None:
        if self.shards is not None:
            self.shards.close()
