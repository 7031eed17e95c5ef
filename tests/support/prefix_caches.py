"""Simple, slow prefix caches, to compare fast ones with.

Prompts are lists of page IDs; a page is named by all IDs up to it. A request holds all its pages at once;
a request larger than the pool is skipped."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

Prompts = Sequence[Sequence[int]]
NEVER = 1 << 60


def lru_hits(prompts: Prompts, num_pages: int) -> int:
    """Return the hits of LRU, which evicts the tail of a prompt before its head."""
    kept: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = 0
    for pages in _named(prompts, num_pages):
        hits += len(list(itertools.takewhile(kept.__contains__, pages)))
        for page in pages:
            kept.pop(page, None)
        while len(kept) + len(pages) > num_pages:
            kept.popitem(last=False)
        kept.update(dict.fromkeys(reversed(pages)))
    return hits


def best_hits(prompts: Prompts, num_pages: int) -> int:
    """Return the most hits of any eviction choice, by exhaustive search."""
    states = {frozenset[tuple[int, ...]](): 0}
    for pages in _named(prompts, num_pages):
        after: dict[frozenset[tuple[int, ...]], int] = {}
        for kept, hits in states.items():
            found = len(list(itertools.takewhile(kept.__contains__, pages)))
            others = kept - set(pages)
            room = min(num_pages - len(pages), len(others))
            for stay in itertools.combinations(sorted(others), room):
                state = frozenset(stay) | frozenset(pages)
                after[state] = max(after.get(state, 0), hits + found)
        states = after
    return max(states.values())


def min_hits(prompts: Prompts, num_pages: int, *, tails_first: bool = True) -> int:
    """Return the hits of Belady's MIN, which evicts the page with the latest next use."""
    chains = _numbered(prompts, num_pages)
    uses: dict[int, list[int]] = {}
    for index in range(len(chains) - 1, -1, -1):
        for page in chains[index]:
            uses.setdefault(page, []).append(index)
    sign, deepest = 1 if tails_first else -1, 1 + max((len(chain) for chain in chains), default=0)
    lateness: dict[int, int] = {}
    kept: set[int] = set()
    hits = 0
    for chain in chains:
        hits += len(list(itertools.takewhile(kept.__contains__, chain)))
        for depth, page in enumerate(chain):
            uses[page].pop()
            lateness[page] = (uses[page][-1] if uses[page] else NEVER) * 2 * deepest + sign * depth
        others = kept - set(chain)
        if (excess := len(others) + len(chain) - num_pages) > 0:
            others -= set(sorted(others, key=lateness.__getitem__)[len(others) - excess :])
        kept = others | set(chain)
    return hits


def _named(prompts: Prompts, num_pages: int) -> list[list[tuple[int, ...]]]:
    return [
        [tuple(chain[: end + 1]) for end in range(len(chain))] for chain in prompts if len(chain) <= num_pages
    ]


def _numbered(prompts: Prompts, num_pages: int) -> list[list[int]]:
    numbers: dict[tuple[int, int], int] = {}
    chains = []
    for prompt in prompts:
        parent, chain = -1, []
        for page in prompt if len(prompt) <= num_pages else ():
            parent = numbers.setdefault((parent, page), len(numbers))
            chain.append(parent)
        chains.append(chain)
    return chains
