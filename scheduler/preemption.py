"""The cost of preempting a sequence, and the stricter admission after preemptions."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.block_manager import BlockManager

from .types import Sequence

MAX_CAUTION = 30  # preemptions that count: 2^30 pages are more than any pool has


def lost_work(sequence: Sequence, blocks: BlockManager) -> int:
    """Return how many positions a running sequence may have to recompute if it is preempted.

    Positions on shared pages are not counted. The other pages may also be found again, if they are not
    evicted first.
    """
    table = sequence.table
    assert table is not None, f"{sequence.sequence_id} has nothing to give back"
    return table.num_written - blocks.num_shared(table)


def has_headroom(sequence: Sequence, running: Iterable[Sequence], blocks: BlockManager) -> bool:
    """Whether a sequence that has its table can run without causing a preemption soon.

    Let k be the most preemptions that the sequence or a running one has had. If k is 0, no free pages are
    required, because most sequences end before ``max_tokens``. Otherwise there must be enough free pages for
    all of these sequences to grow by 2^k - 1 pages, or to their ends. So preemptions of a sequence grow at
    most with the logarithm of its pages: docs/design/preemption-bounds.md.
    """
    members = (*running, sequence)
    times = max(member.history.num_preempted for member in members)
    if times == 0 or len(members) == 1:
        return True
    most = (1 << min(times, MAX_CAUTION)) - 1
    idle = list(blocks.idle_for_pages())
    for member in members:
        for group, pages in enumerate(_growth(member, blocks, most)):
            idle[group] -= pages
    return all(left >= 0 for left in idle)


def _growth(sequence: Sequence, blocks: BlockManager, most: int) -> list[int]:
    """Return how many more pages of each group must be free for a sequence and its parallel samples.

    Each gets pages for the tokens that it has, and up to ``most`` more pages.
    """
    table = sequence.table
    assert table is not None, f"{sequence.sequence_id} has no pages"
    num_tokens = len(sequence.tokens)
    known = blocks.growth(table, num_tokens)
    growth = blocks.growth(table, sequence.max_length)
    pages = [now + min(most, end - now) for now, end in zip(known, growth, strict=True)]
    for sample in sequence.parallel_samples:  # parallel samples share the full pages of the prompt
        shared = num_tokens // blocks.page_size
        end = -(-sample.max_length // blocks.page_size)
        pages = [count + min(most + 1, end - shared) for count in pages]
    return pages
