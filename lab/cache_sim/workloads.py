"""Made-up traffic, so that a policy is not judged by one trace alone. Pages, not tokens."""

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
    """Conversations that begin every 300 ms or so, and go on with a chance of three in four after
    a log-normal time to think. Each begins with one of some system prompts, the first one most
    often, and repeats all it has said, plus one to six pages."""
    rng = random.Random(seed)
    fresh = itertools.count(num_systems * system_pages)
    upcoming: list[tuple[float, list[int]]] = []  # a heap: when a conversation goes on, and its pages
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
    """The same with a batch job in between: every tenth request brings 60 more pages that nobody has
    seen and nobody will see again."""
    fresh = itertools.count(1_000_000_000)
    return [scanned for number, request in enumerate(requests) for scanned in _scan(request, number, fresh)]


def _scan(request: TraceRequest, number: int, fresh: Iterator[int]) -> list[TraceRequest]:
    if number % 10:
        return [request]
    return [request, TraceRequest(request.timestamp_ms, 1, [*itertools.islice(fresh, 60)])]


# By name, and by seed: equal seeds give equal traffic.
WORKLOADS: dict[str, Callable[[int], list[TraceRequest]]] = {
    "chats, 5 s to think": lambda seed: chats(seed, think_ms=5_000, spread=0.5),
    "chats, 60 s to think": lambda seed: chats(seed, think_ms=60_000, spread=1.0),
    "chats, 10 min to think": lambda seed: chats(seed, think_ms=600_000, spread=1.0),
    "shared system prompts": lambda seed: chats(
        seed, think_ms=60_000, spread=1.0, system_pages=30, num_systems=8
    ),
    "chats and scans": lambda seed: with_scans(chats(seed, think_ms=20_000, spread=1.0)),
}
