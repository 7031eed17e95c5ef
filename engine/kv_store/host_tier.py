from __future__ import annotations

import time
from collections import OrderedDict, abc, deque
from collections.abc import Callable
from dataclasses import dataclass

from octavo.block_manager import BlockManager, Digest, PageId
from octavo.kernels.page_bytes import PageBytes
from octavo.scheduler import KVConnector, NoConnector, SchedulerOutput, Sequence

from ..api.errors import InvalidConfig
from ..api.store_counters import SwapCounts
from ..memory.budget import available_memory, format_size
from .prefetch import FetchedPage, PrefetchJob, Rate, adopt
from .transfer import PageAccess, PageTransfer

STEP_BYTES = 64 * 1024**2  # bytes of pages that one step copies back


@dataclass(slots=True)
class _Return:
    fetch: PrefetchJob
    missing: deque[tuple[int, int]]  # (group, page index)


class HostTier:
    """Copies of pages in host memory, found by digest. The least recently used are evicted."""

    def __init__(
        self,
        access: PageAccess,
        blocks: BlockManager,
        transfer: PageTransfer,
        *,
        max_bytes: int,
        behind: KVConnector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises InvalidConfig if ``max_bytes`` exceed the free memory."""
        if max_bytes > (free := available_memory()):
            raise InvalidConfig(
                f"swap_memory must be at most the {format_size(free)} of free memory, got "
                f"{format_size(max_bytes)}; lower it"
            )
        self._access = access
        self._blocks = blocks
        self._transfer = transfer
        self._max_bytes = max_bytes
        self._behind = behind or NoConnector()
        self._clock = clock
        self._pages: OrderedDict[tuple[Digest, int], PageBytes] = OrderedDict()
        self._num_bytes = 0
        self._page_bytes = [0] * len(blocks.parts)
        self._returns: dict[Sequence, _Return] = {}
        self._out, self._in = Rate(), Rate()
        self._num_out = self._num_in = 0

    @property
    def counts(self) -> SwapCounts:
        return SwapCounts(num_out=self._num_out, num_in=self._num_in, num_bytes=self._num_bytes)

    @property
    def has_updates(self) -> bool:
        return bool(self._returns) or self._behind.has_updates

    @property
    def saves_steps(self) -> bool:
        return self._behind.saves_steps

    def on_update(self, wake: Callable[[], None]) -> None:
        self._behind.on_update(wake)

    def offload(self, sequence: Sequence, token_s: float | None) -> None:
        digests = sequence.digests
        count = self._blocks.num_findable(digests)
        needed = self._needed(count)
        if (num_bytes := self._bytes_of(needed)) > self._max_bytes:
            most = count * self._max_bytes // num_bytes
            count = self._blocks.num_findable(digests[:most])
            needed = self._needed(count)
        new = [part for part in needed if (digests[part[1]], part[0]) not in self._pages]
        if token_s is not None:
            limit_s = count * self._blocks.page_size * token_s - self._in.seconds(self._bytes_of(needed))
            if not self._out.is_within(self._bytes_of(new), limit_s):
                return
        for group, index in needed:
            if (digests[index], group) in self._pages:
                self._pages.move_to_end((digests[index], group))
        self._copy_out(digests, new)

    def start_load(self, sequence: Sequence, /, *, token_s: float | None = None) -> bool:
        if not self._pages:
            return self._behind.start_load(sequence, token_s=token_s)
        fetch = PrefetchJob.of(sequence, self._blocks)
        missing = deque(fetch.plan(self._blocks.parts, self._has))
        if not missing:
            return self._behind.start_load(sequence, token_s=token_s)
        if token_s is not None:
            gained = fetch.gain(self._blocks.parts, self._has) * self._blocks.page_size
            if not self._in.is_within(self._bytes_of(missing), gained * token_s):
                return False
        self._returns[sequence] = _Return(fetch, missing)
        return True

    def poll(self) -> list[Sequence]:
        left, ready = STEP_BYTES, []
        for sequence, each in self._returns.items():
            pages: list[FetchedPage] = []
            while each.missing and left > 0:
                group, index = each.missing.popleft()
                data = self._pages.get((each.fetch.digests[index], group))
                if data is None:
                    each.missing.clear()
                    break
                left -= data.nbytes
                pages.append(FetchedPage(group, index, data))
            began = self._clock()
            num_new, goes_on = adopt(self._transfer, each.fetch, pages, sequence.salt)
            if pages:
                self._in.observe(sum(page.data.nbytes for page in pages), self._clock() - began)
            self._num_in += num_new
            if not (each.missing and goes_on):
                ready.append(sequence)
        for sequence in ready:
            del self._returns[sequence]
        return [*ready, *self._behind.poll()]

    def cancel_load(self, sequence: Sequence) -> None:
        if self._returns.pop(sequence, None) is None:
            self._behind.cancel_load(sequence)

    def save(self, step: SchedulerOutput) -> None:
        self._behind.save(step)

    def close(self) -> None:
        self._behind.close()

    def _has(self, digest: Digest, group: int) -> bool:
        return (digest, group) in self._pages

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
            self._out.observe(num_bytes, self._clock() - began)
        while self._num_bytes > self._max_bytes:
            _, row = self._pages.popitem(last=False)
            self._num_bytes -= row.nbytes
