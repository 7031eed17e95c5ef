"""Rows for drafts: guesses at the next tokens of decoding sequences, checked by the step that computes them.

A draft is one more row of its sequence, behind its last token. Its K/V goes to the place where that of the
right token will lie, so whatever turns out to be wrong is written over by the next step; only what is
right is committed, and thus published.
"""

from __future__ import annotations

from octavo.block_manager import BlockManager, PageTable

from .budget import TokenBudget
from .draft_times import NUM_ROWS
from .types import ScheduledChunk, SchedulerOutput, Sequence


def plan_drafts(work: list[ScheduledChunk], budget: TokenBudget, blocks: BlockManager) -> bool:
    """Add to decoding sequences in ``work`` as many of their drafts as fit the step and the pool.

    Return whether any may have been added.

    Nobody is preempted for a draft. Where the budget is short, or slots for recurrent states are, everyone
    gets about as much. Their number in all is one of ``NUM_ROWS``, unless pages are short.
    """
    places = [index for index, item in enumerate(work) if item[0].drafts and _decodes(item)]
    if not places:
        return False
    granted: list[int] = []
    slots = blocks.num_draftable(len(work))
    for number, index in enumerate(places):
        left = budget.left if slots is None else min(budget.left, slots - sum(granted))
        sequence, share = work[index].sequence, -(-left // (len(places) - number))
        wanted = min(len(sequence.drafts), _tokens_left(sequence) - 1, share)
        granted.append(budget.grant_drafts(sequence, wanted))
        budget.spend_drafts(sequence, granted[-1])
    for index, wanted in zip(places, _trimmed(granted), strict=True):
        item = work[index]
        count = _reserve(item, wanted, blocks)
        if count > 0:
            assert item.sequence.table is not None
            blocks.plan_drafts(item.sequence.table, item.stop, count)
            work[index] = item._replace(drafts=item.sequence.drafts[:count])
    return True


def _trimmed(counts: list[int]) -> list[int]:
    """So many drafts of each sequence that their sum is one of ``NUM_ROWS``.

    The longest runs lose their ends, which are the least likely to hold."""
    total = sum(counts)
    excess = total - max((number for number in NUM_ROWS if number <= total), default=total)
    trimmed = list(counts)
    for _ in range(excess):
        longest = max(range(len(trimmed)), key=trimmed.__getitem__)
        trimmed[longest] -= 1
    return trimmed


def drop_rejected(table: PageTable, blocks: BlockManager) -> None:
    """Give back what was reserved for drafts that were wrong: all behind the written positions."""
    blocks.rollback(table, table.num_written)
    assert not blocks.has_copies, "a sequence that decodes owns the page it writes"


def _decodes(item: ScheduledChunk) -> bool:
    return item.samples and item.stop - item.start == 1 and not item.parallel_samples


def _tokens_left(sequence: Sequence) -> int:
    return sequence.max_length - len(sequence.tokens)


def _reserve(item: ScheduledChunk, wanted: int, blocks: BlockManager) -> int:
    """Drafts that there are pages for."""
    table = item.sequence.table
    assert table is not None, f"{item.sequence.sequence_id} was planned without pages"
    if wanted > 0 and blocks.reserve(table, item.stop + wanted):
        return wanted
    return min(wanted, table.capacity - item.stop)


def draft_rows(step: SchedulerOutput) -> tuple[int, int] | None:
    """The sequences that get a token from a step, and the drafts in it; None if it computes anything else."""
    if step.plain:
        return len(step.work), 0
    num_drafts = 0
    for _, start, stop, samples, parallel_samples, drafts in step.work:
        if not samples or parallel_samples or stop - start != 1:
            return None
        num_drafts += len(drafts)
    return len(step.work), num_drafts
