"""Replay of a trace through the block manager, to count hits at a given cache size."""

from __future__ import annotations

import gc
import heapq
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.block_manager import BlockManager, PageTable, RecurrentState
from octavo.block_manager.policies import DEFAULT_POLICY

from .trace import TraceRequest

TOKEN_MS = 25.0  # milliseconds between generated tokens, with --timed


@dataclass(frozen=True, slots=True)
class Replayed:
    """Results of a replay with one policy.

    skipped_requests  requests larger than the pool; their pages are not counted
    hit_pages         pages found together with all pages before them
    peak_pages        largest number of pages in use by requests or cached
    """

    requests: int
    skipped_requests: int
    prompt_pages: int
    hit_pages: int
    evicted_pages: int
    peak_pages: int
    seconds: float

    @property
    def hit_ratio(self) -> float:
        return self.hit_pages / self.prompt_pages if self.prompt_pages else 0.0

    @property
    def pages_per_s(self) -> float:
        return self.prompt_pages / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "hit_ratio": self.hit_ratio, "pages_per_s": self.pages_per_s}


def replay(
    requests: Sequence[TraceRequest],
    num_pages: int | None,
    *,
    policy: str = DEFAULT_POLICY,
    token_ms: float | None = None,
    states: RecurrentState | None = None,
) -> Replayed:
    """Look up and publish each prompt in order; release its pages when the request is done.

    num_pages   size of the pool; None: as many as the trace can need
    token_ms    milliseconds per generated token; None: requests end at once
    states      slots for recurrent states, if the model has any; a hit then also needs a snapshot
    """
    total = sum(len(request.page_ids) for request in requests)
    blocks = BlockManager(total if num_pages is None else num_pages, 1, policy=policy, states=states)
    prompts = [[*request.page_ids, 0] for request in requests]
    holding = _Holding(blocks, token_ms)
    skipped = prompt_pages = hit_pages = 0
    gc.freeze()  # the trace stays in memory, so do not scan it again and again
    began = time.perf_counter()
    for request, tokens in zip(requests, prompts, strict=True):
        need = len(request.page_ids)
        if need > blocks.num_pages:
            skipped += 1
            continue
        prompt_pages += need
        hit_pages += holding.serve(request, tokens)
    seconds = time.perf_counter() - began
    gc.unfreeze()
    holding.release_all()
    peak = blocks.num_pages - blocks.counts.idle_empty
    return Replayed(len(requests), skipped, prompt_pages, hit_pages, blocks.num_evicted, peak, seconds)


class _Holding:
    def __init__(self, blocks: BlockManager, token_ms: float | None) -> None:
        self._blocks = blocks
        self._token_ms = token_ms
        self._running: list[tuple[float, int, PageTable]] = []
        self._num_served = 0

    def serve(self, request: TraceRequest, tokens: list[int]) -> int:
        blocks, now = self._blocks, request.timestamp_ms
        while self._running and self._running[0][0] <= now:
            self._release_one()
        table = blocks.open(tokens, salt=request.salt)
        while not blocks.reserve(table, len(tokens) - 1):
            blocks.close(table)
            now = max(now, self._running[0][0])
            self._release_one()
            table = blocks.open(tokens, salt=request.salt)
        num_hit = table.num_written
        blocks.copied(blocks.take_copies())
        if blocks.states is not None and (full := len(tokens) - 1 - request.ends_partial) > num_hit:
            blocks.plan_snapshots(table, num_hit, full, num_known=full)
            blocks.commit(table, tokens, full)
        blocks.commit(table, tokens, len(tokens) - 1)
        if self._token_ms is None:
            blocks.close(table)
        else:
            self._num_served += 1
            end = now + self._token_ms * request.output_tokens
            heapq.heappush(self._running, (end, self._num_served, table))
        return num_hit

    def release_all(self) -> None:
        while self._running:
            self._release_one()

    def _release_one(self) -> None:
        self._blocks.close(heapq.heappop(self._running)[2])
