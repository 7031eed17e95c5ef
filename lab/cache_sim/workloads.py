"""Synthetic traffic for comparing eviction policies."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator

from .trace import TraceRequest

NUM_REQUESTS = 6000
SEED = 1


def chats(
    seed: int, *, think_ms: float, spread: float, system_pages: int = 1, num_systems: int = 1
) -> list[TraceRequest]:
    """Return the requests of conversations, one of which begins about every 300 ms.

    After each turn, a conversation goes on with a chance of 3/4, after a log-normal time to think. It begins
    with one of several system prompts, most often the first. A turn repeats the conversation and adds one to
    six pages.
    """
    rng = random.Random(seed)
    fresh = itertools.count(num_systems * system_pages)
    upcoming: list[tuple[float, list[int]]] = []
    begins = 0.0
    requests: list[TraceRequest] = []
    while len(requests) < NUM_REQUESTS:
        if not upcoming or begins < upcoming[0][0]:
            system = min(int(rng.expovariate(0.7)), num_systems - 1)
            now, pages = begins, [*range(system * system_pages, (system + 1) * system_pages)]
            begins += rng.expovariate(1 / 300)
        else:
            now, pages = heapq.heappop(upcoming)
        pages = [*pages, *itertools.islice(fresh, rng.randint(1, 6))]
        requests.append(TraceRequest(now, 100, pages))
        if rng.random() < 0.75:
            heapq.heappush(upcoming, (now + think_ms * rng.lognormvariate(0, spread), pages))
    return requests


def with_scans(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Return ``requests`` and a batch job: after every tenth request, 60 pages that are never used again."""
    fresh = itertools.count(1_000_000_000)
    return [scanned for number, request in enumerate(requests) for scanned in _scan(request, number, fresh)]


def _scan(request: TraceRequest, number: int, fresh: Iterator[int]) -> list[TraceRequest]:
    if number % 10:
        return [request]
    return [request, TraceRequest(request.timestamp_ms, 1, [*itertools.islice(fresh, 60)])]


WORKLOADS: dict[str, Callable[[int], list[TraceRequest]]] = {
    "chats, 5 s to think": lambda seed: chats(seed, think_ms=5_000, spread=0.5),
    "chats, 60 s to think": lambda seed: chats(seed, think_ms=60_000, spread=1.0),
    "chats, 10 min to think": lambda seed: chats(seed, think_ms=600_000, spread=1.0),
    "shared system prompts": lambda seed: chats(
        seed, think_ms=60_000, spread=1.0, system_pages=30, num_systems=8
    ),
    "chats and scans": lambda seed: with_scans(chats(seed, think_ms=20_000, spread=1.0)),
}
