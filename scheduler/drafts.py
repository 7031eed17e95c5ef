from __future__ import annotations

from collections.abc import Mapping

from octavo.block_manager import BlockManager, PageTable

from .budget import TokenBudget
from .types import ScheduledChunk, Sequence

NUM_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of drafts that a step may have in total. They are few, because the first step with a new number of
rows captures a program and later ones replay it. The time of the first step is ignored, because with small
models a capture takes many times as long."""


def plan_drafts(
    work: list[ScheduledChunk],
    drafts: Mapping[Sequence, tuple[int, ...]],
    budget: TokenBudget,
    blocks: BlockManager,
) -> bool:
    """Add as many draft tokens to decoding sequences as fit into the step and the pool.

    Return False if no decoding sequence has drafts. No sequence is preempted for a draft.
    """
    places = [index for index, item in enumerate(work) if item[0] in drafts and _decodes(item)]
    if not places:
        return False
    granted: list[int] = []
    slots = blocks.num_draftable(len(work))
    for number, index in enumerate(places):
        left = budget.left if slots is None else min(budget.left, slots - sum(granted))
        sequence, share = work[index].sequence, -(-left // (len(places) - number))
        tokens_left = sequence.max_length - len(sequence.tokens)
        wanted = min(len(drafts[sequence]), tokens_left - 1, share)
        granted.append(budget.grant_drafts(sequence, wanted))
        budget.spend_drafts(sequence, granted[-1])
    for index, wanted in zip(places, _trimmed(granted), strict=True):
        item = work[index]
        count = _reserve(item, wanted, blocks)
        if count > 0:
            assert item.sequence.table is not None
            blocks.plan_drafts(item.sequence.table, item.stop, count)
            work[index] = item._replace(drafts=drafts[item.sequence][:count])
    return True


def _trimmed(counts: list[int]) -> list[int]:
    total = sum(counts)
    excess = total - max((number for number in NUM_ROWS if number <= total), default=total)
    trimmed = list(counts)
    for _ in range(excess):
        longest = max(range(len(trimmed)), key=trimmed.__getitem__)
        trimmed[longest] -= 1
    return trimmed


def drop_rejected(table: PageTable, blocks: BlockManager) -> None:
    blocks.rollback(table, table.num_written)
    assert not blocks.has_copies, "a sequence that decodes owns the page it writes"


def _decodes(item: ScheduledChunk) -> bool:
    return item.samples and item.stop - item.start == 1 and not item.parallel_samples


def _reserve(item: ScheduledChunk, wanted: int, blocks: BlockManager) -> int:
    table = item.sequence.table
    assert table is not None, f"{item.sequence.sequence_id} was planned without pages"
    if wanted > 0 and blocks.reserve(table, item.stop + wanted):
        return wanted
    return min(wanted, table.capacity - item.stop)
