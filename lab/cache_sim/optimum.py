"""Upper bound on the hits of any eviction policy: Belady's MIN, which knows the future."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from .trace import TraceRequest

NEVER = 1 << 60


def optimal_hits(requests: Sequence[TraceRequest], num_pages: int) -> int:
    """Return the number of hits in a pool that always evicts the page whose next use is latest.

    L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5
    (1966). Of two pages needed at the same time, the deeper one is evicted, so cached prefixes have no holes.
    A request larger than the pool is skipped. The bound is exact if requests come one by one.
    """
    served = [request for request in requests if len(request.page_ids) <= num_pages]
    chains, next_uses = _next_uses(served)
    kept: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    num_hit = 0
    for pages, uses in zip(chains, next_uses, strict=True):
        for page in pages:
            num_hit += kept.pop(page, None) is not None
        while len(kept) + len(pages) > num_pages:
            use, _, page = heapq.heappop(heap)
            if kept.get(page) == -use:
                del kept[page]
        for depth, (page, use) in enumerate(zip(pages, uses, strict=True)):
            kept[page] = use
            heapq.heappush(heap, (-use, -depth, page))
    return num_hit


def _next_uses(requests: Sequence[TraceRequest]) -> tuple[list[list[int]], list[list[int]]]:
    names: dict[tuple[int | bytes, int], int] = {}
    chains = []
    for request in requests:
        parent: int | bytes = request.salt
        chain = []
        for page_id in request.page_ids:
            parent = names.setdefault((parent, page_id), len(names))
            chain.append(parent)
        chains.append(chain)
    upcoming: dict[int, int] = {}
    next_uses: list[list[int]] = []
    for index in range(len(chains) - 1, -1, -1):
        next_uses.append([upcoming.get(page, NEVER) for page in chains[index]])
        upcoming.update(dict.fromkeys(chains[index], index))
    next_uses.reverse()
    return chains, next_uses
