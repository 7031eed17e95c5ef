from __future__ import annotations

from collections.abc import Iterable

from octavo.block_manager import BlockManager

from .types import Sequence

MAX_COUNTED_PREEMPTIONS = 30  # further preemptions of a sequence do not count; 2^30 pages exceed any pool


def lost_work(sequence: Sequence, blocks: BlockManager) -> int:
    """Return how many positions a running sequence may have to recompute if it is preempted."""
    table = sequence.table
    assert table is not None, f"{sequence.sequence_id} has nothing to release"
    return table.num_written - blocks.num_shared(table)


def has_headroom(sequence: Sequence, running: Iterable[Sequence], blocks: BlockManager) -> bool:
    """Return whether a sequence can run without causing a preemption soon.

    Let k be the largest number of preemptions among this and the running sequences. If k is above 0, the
    free pages must suffice for each of them to grow by 2^k - 1 pages, or to its end. So a sequence's number
    of preemptions is at most logarithmic in its pages (docs/design/preemption-bounds.md).
    """
    members = (*running, sequence)
    times = max(member.history.num_preempted for member in members)
    if times == 0 or len(members) == 1:
        return True
    most = (1 << min(times, MAX_COUNTED_PREEMPTIONS)) - 1
    idle = list(blocks.idle_pages()[: len(blocks.groups)])
    for member in members:
        for group, pages in enumerate(_growth(member, blocks, most)):
            idle[group] -= pages
    return all(left >= 0 for left in idle)


def _growth(sequence: Sequence, blocks: BlockManager, most: int) -> list[int]:
    table = sequence.table
    assert table is not None, f"{sequence.sequence_id} has no pages"
    num_tokens = len(sequence.tokens)
    known = blocks.growth(table, num_tokens)
    growth = blocks.growth(table, sequence.max_length)
    pages = [now + min(most, end - now) for now, end in zip(known, growth, strict=True)]
    for sample in sequence.parallel_samples:
        shared = num_tokens // blocks.page_size
        end = -(-sample.max_length // blocks.page_size)
        pages = [count + min(most + 1, end - shared) for count in pages]
    return pages
