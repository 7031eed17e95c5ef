"""Traffic served by the real scheduler and block manager on a simulated clock, without a model."""

from __future__ import annotations

from collections import abc, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.block_manager import BlockManager
from octavo.engine.api.store_counters import SwapCounts
from octavo.engine.kv_store.host_memory import HostMemory
from octavo.engine.kv_store.page_runs import PageLayoutKey
from octavo.engine.kv_store.page_store import PageStore
from octavo.engine.kv_store.transfer import PageTransfer
from octavo.kernels.page_bytes import PageBytes
from octavo.scheduler import LatencyGoal, Limits, SampleResult, Scheduler, SchedulerOutput, Sequence, Status
from octavo.scheduler.step_cost import shape_of
from octavo.scheduler.waiting import WaitingQueue

PAGE_BYTES = 64  # nominal; only the number of pages matters


class SimulatedPages:
    """A ``PageAccess`` whose copies take ``page_s`` seconds of simulated time per page."""

    def __init__(self, page_s: float) -> None:
        self.copied_s = 0.0
        self._page_s = page_s

    @property
    def page_layout_key(self) -> PageLayoutKey:
        raise AssertionError("simulated pages leave this pool for no other one")

    def read_pages(self, pages: abc.Sequence[int], group: int) -> PageBytes:  # noqa: ARG002
        self.copied_s += len(pages) * self._page_s
        return np.zeros((len(pages), PAGE_BYTES), np.uint8)

    def write_pages(self, pages: abc.Sequence[int], data: PageBytes, group: int) -> None:  # noqa: ARG002
        self.copied_s += len(pages) * self._page_s


class SimulatedSwap:
    def __init__(self, blocks: BlockManager, num_pages: int, page_s: float) -> None:
        self._pages = SimulatedPages(page_s)
        max_bytes, clock = num_pages * PAGE_BYTES, self.copied_s
        self.host = HostMemory(self._pages, blocks, max_bytes=max_bytes, clock=clock)
        transfer = PageTransfer(self._pages, blocks)
        self.store = PageStore(blocks, transfer, host=self.host, clock=clock)

    def copied_s(self) -> float:
        return self._pages.copied_s


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    tenant: str
    prompt: list[int]
    output_tokens: int
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class StepModel:
    """Milliseconds of a step: constant, per decode row, per prompt token, per 1,000 attended positions."""

    step_ms: float
    row_ms: float
    prompt_token_ms: float
    position_ms: float

    def seconds(self, step: SchedulerOutput) -> float:
        shape = shape_of(step.work)
        positions = shape.num_positions + shape.chunk_positions
        return (
            self.step_ms
            + self.row_ms * shape.num_decodes
            + self.prompt_token_ms * shape.num_chunk_tokens
            + self.position_ms * positions / 1000
        ) / 1000


@dataclass(slots=True)
class Served:
    """One request's times, in simulated seconds."""

    arrival: Arrival
    sequence: Sequence
    first_at: float | None = None
    last_at: float = 0.0
    gaps: list[float] = field(default_factory=list)  # seconds between tokens

    @property
    def ttft(self) -> float:
        assert self.first_at is not None
        return self.first_at - self.arrival.at_s


@dataclass(frozen=True, slots=True)
class Moment:
    at_s: float
    gap: float
    longest_wait_s: float
    preemptions: int


@dataclass(slots=True)
class Outcome:
    """Result of a simulation."""

    served: list[Served]
    seconds: float
    preemptions: int
    hit_tokens: int
    prompt_tokens: int
    gap: float
    computed_tokens: int
    pages_out: int = 0  # pages copied to swap memory and back
    pages_in: int = 0
    course: list[Moment] = field(default_factory=list)

    def share_of_good(self, ttft_s: float, itl_s: float) -> float:
        """Return the share of requests whose first token and gaps were all within the limits."""
        good = sum(each.ttft <= ttft_s and max(each.gaps, default=0.0) <= itl_s for each in self.served)
        return good / len(self.served)

    def to_json(self, ttft_s: float, itl_s: float) -> dict[str, Any]:
        tokens = (
            sum(each.arrival.output_tokens for each in self.served) + self.prompt_tokens - self.hit_tokens
        )
        by_tenant: dict[str, list[float]] = defaultdict(list)
        for each in self.served:
            by_tenant[each.arrival.tenant].append(each.ttft)
        return {
            "seconds": self.seconds,
            "tokens_per_s": tokens / self.seconds,
            "requests_per_s": len(self.served) / self.seconds,
            "goodput_per_s": len(self.served) * self.share_of_good(ttft_s, itl_s) / self.seconds,
            "hit_ratio": self.hit_tokens / self.prompt_tokens,
            "preemptions": self.preemptions,
            "computed_tokens": self.computed_tokens,
            "pages_out": self.pages_out,
            "pages_in": self.pages_in,
            "itl_p99_s": quantile([gap for each in self.served for gap in each.gaps] or [0.0], 0.99),
            "longest_wait_s": max(each.ttft for each in self.served),
            "service_gap": self.gap,
            "ttft_p95_s": {tenant: quantile(times, 0.95) for tenant, times in sorted(by_tenant.items())},
        }

    def lines(self) -> dict[str, list[float]]:
        return {
            "ttft_s": [each.ttft for each in self.served],
            "at_s": [moment.at_s for moment in self.course],
            "service_gap": [moment.gap for moment in self.course],
            "longest_wait_s": [moment.longest_wait_s for moment in self.course],
            "preemptions": [moment.preemptions for moment in self.course],
        }


@dataclass(slots=True)
class _Gap:
    service: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ranges: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    largest: float = 0.0

    @property
    def current(self) -> float:
        return max((high - low for low, high in self.ranges.values()), default=0.0)

    def note(self, waiting: set[str]) -> None:
        pairs = {(a, b) for a in waiting for b in waiting if a < b}
        for pair in [pair for pair in self.ranges if pair not in pairs]:
            del self.ranges[pair]
        for pair in pairs:
            difference = self.service[pair[0]] - self.service[pair[1]]
            low, high = self.ranges.get(pair, (difference, difference))
            self.ranges[pair] = low, high = min(low, difference), max(high, difference)
            self.largest = max(self.largest, high - low)


def simulate(
    arrivals: abc.Sequence[Arrival],
    blocks: BlockManager,
    limits: Limits,
    queue: WaitingQueue,
    model: StepModel,
    *,
    target_ttft_s: float | None = None,
    swap: SimulatedSwap | None = None,
) -> Outcome:
    """Serve all arrivals, which are in order of time.

    target_ttft_s   target of every request for the first token, in seconds
    """
    scheduler = Scheduler(blocks, limits, swap.store if swap is not None else None, waiting=queue)
    served: dict[Sequence, Served] = {}
    gap, now, index, hits, computed = _Gap(), 0.0, 0, 0, 0
    course: list[Moment] = []
    while index < len(arrivals) or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, arrivals[index].at_s)
        while index < len(arrivals) and arrivals[index].at_s <= now:
            each = arrivals[index]
            sequence = Sequence(
                str(index),
                list(each.prompt),
                each.output_tokens,
                each.salt,
                tenant=each.tenant,
                latency=LatencyGoal(
                    first_token_by=None if target_ttft_s is None else each.at_s + target_ttft_s
                ),
            )
            served[sequence] = Served(each, sequence)
            scheduler.add(sequence)
            index += 1
        copied_s = swap.copied_s() if swap is not None else 0.0
        step = scheduler.plan(now)
        assert step is not None
        if swap is not None:
            now += swap.copied_s() - copied_s
        computed += step.num_tokens
        hits += sum(lookup.num_hit for lookup in step.lookups)
        seconds = model.seconds(step)
        now += seconds
        for item in step.work:
            new = min(item.stop, item.sequence.num_prompt) - item.start
            gap.service[item.sequence.tenant] += max(0, new) + 2 * item.samples
        scheduler.commit(step, [SampleResult(1)] * len(step.sampled()))
        scheduler.observe(step, seconds)
        _note_tokens(step, served, now)
        gap.note({s.arrival.tenant for s in served.values() if s.sequence.status is Status.WAITING})
        oldest = min((s.arrival.at_s for s in served.values() if s.first_at is None), default=now)
        course.append(Moment(now, gap.current, now - oldest, scheduler.num_preemptions))
    counts = swap.host.counts() if swap is not None else SwapCounts()
    return Outcome(
        list(served.values()), now, scheduler.num_preemptions, hits,
        sum(len(each.prompt) for each in arrivals), gap.largest, computed, counts.num_out, counts.num_in,
        course,
    )  # fmt: skip


def quantile(values: abc.Sequence[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def _note_tokens(step: SchedulerOutput, served: dict[Sequence, Served], now: float) -> None:
    for sequence in step.sampled():
        each = served[sequence]
        if each.first_at is None:
            each.first_at = now
        else:
            each.gaps.append(now - each.last_at)
        each.last_at = now
