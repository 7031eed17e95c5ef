from __future__ import annotations

import time
from collections import OrderedDict, abc
from collections.abc import Callable

from octavo.block_manager import BlockManager, Digest, PageId
from octavo.kernels.page_bytes import PageBytes
from octavo.scheduler import Sequence

from ..api.errors import InvalidConfig
from ..api.store_counters import SwapCounts
from ..memory.budget import available_memory, format_size
from .prefetch import FetchedPage, PrefetchJob, Rate
from .transfer import PageAccess


class HostMemory:
    """Copies of pages in host memory, found by digest. The least recently used are evicted.

    Pages that a job loads are kept until then, even beyond ``max_bytes``.
    """

    def __init__(
        self,
        access: PageAccess,
        blocks: BlockManager,
        *,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises InvalidConfig if ``max_bytes`` exceed the free memory."""
        if max_bytes > (free := available_memory()):
            raise InvalidConfig(
                f"swap_memory must be at most the {format_size(free)} of free memory, got "
                f"{format_size(max_bytes)}; lower it"
            )
        self._rate = Rate()
        self._page_bytes = [0] * len(blocks.parts)
        self._access = access
        self._blocks = blocks
        self._max_bytes = max_bytes
        self._clock = clock
        self._pages: OrderedDict[tuple[Digest, int], PageBytes] = OrderedDict()
        self._num_bytes = 0
        self._write_rate = Rate()
        self._num_out = self._num_in = 0

    def counts(self) -> SwapCounts:
        return SwapCounts(num_out=self._num_out, num_in=self._num_in, num_bytes=self._num_bytes)

    def used(self, digests: abc.Sequence[Digest]) -> None: ...

    def _has(self, digest: Digest, group: int) -> bool:
        return (digest, group) in self._pages

    def start(self, job: PrefetchJob) -> bool:
        plan = job.plan(self._has) if self._pages else []
        if not plan or not job.is_quicker(self._has, self._page_bytes, self._rate):
            return False
        for group, index in plan:
            job.pages.append(FetchedPage(group, index, self._pages[job.digests[index], group]))
        job.ended = True
        return True

    def take(self, job: PrefetchJob, num_bytes: int) -> list[FetchedPage]:
        return job.take(num_bytes)

    def cancel(self, job: PrefetchJob) -> None: ...

    def loaded(self, num_new: int, num_bytes: int, seconds: float) -> None:
        self._num_in += num_new
        if num_bytes:
            self._rate.observe(num_bytes, seconds)

    def offload(self, sequence: Sequence, token_s: float | None) -> None:
        digests = sequence.digests
        count = self._blocks.num_findable(digests)
        needed = self._needed(count)
        if (num_bytes := self._bytes_of(needed)) > self._max_bytes:
            most = count * self._max_bytes // num_bytes
            count = self._blocks.num_findable(digests[:most])
            needed = self._needed(count)
        new = [(group, index) for group, index in needed if not self._has(digests[index], group)]
        if token_s is not None:
            limit_s = count * self._blocks.page_size * token_s - self._rate.seconds(self._bytes_of(needed))
            if not self._write_rate.is_within(self._bytes_of(new), limit_s):
                return
        for group, index in needed:
            if self._has(digests[index], group):
                self._pages.move_to_end((digests[index], group))
        self._copy_out(digests, new)

    def _needed(self, count: int) -> list[tuple[int, int]]:
        return [
            (group, index)
            for group in range(len(self._blocks.parts))
            for index in sorted(self._blocks.needed_pages(count, group=group))
        ]

    def _bytes_of(self, parts: abc.Sequence[tuple[int, int]]) -> int:
        return sum(self._page_bytes[group] for group, _ in parts)

    def _copy_out(self, digests: abc.Sequence[Digest], parts: abc.Sequence[tuple[int, int]]) -> None:
        began, num_bytes = self._clock(), 0
        for group in range(len(self._page_bytes)):
            indices = [index for number, index in parts if number == group]
            pages = [self._blocks.find(digests[index], group) for index in indices]
            rows = self._access.read_pages([PageId(page) for page in pages if page is not None], group)
            for index, row in zip(indices, rows, strict=True):
                self._pages[digests[index], group] = row.copy()  # a copy, so that it can be freed alone
                self._page_bytes[group] = row.nbytes
                num_bytes += row.nbytes
        self._num_out += len(parts)
        self._num_bytes += num_bytes
        if num_bytes:
            self._write_rate.observe(num_bytes, self._clock() - began)
        while self._num_bytes > self._max_bytes:
            _, row = self._pages.popitem(last=False)
            self._num_bytes -= row.nbytes
