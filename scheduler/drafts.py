"""Rows for drafts: draft tokens of decoding sequences, verified by the step that computes them.

A draft is one more row of its sequence, after its last token. Its K and V are written to the place of the
correct token, so the next step overwrites those of wrong drafts. Only accepted drafts are committed and
published.
"""

from __future__ import annotations

from octavo.block_manager import BlockManager, PageTable

from .budget import TokenBudget
from .draft_times import NUM_ROWS
from .types import ScheduledChunk, SchedulerOutput, Sequence


def plan_drafts(work: list[ScheduledChunk], budget: TokenBudget, blocks: BlockManager) -> bool:
    """Add to decoding sequences in ``work`` as many of their drafts as fit the step and the pool.

    Return whether any may have been added.

    No sequence is preempted for a draft. If tokens or recurrent slots are short, sequences get about equal
    numbers. The total is one of ``NUM_ROWS``, unless pages are short.
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
    """Return numbers of drafts per sequence whose sum is one of ``NUM_ROWS``.

    The longest drafts are shortened, because their ends are the least likely to be accepted.
    """
    total = sum(counts)
    excess = total - max((number for number in NUM_ROWS if number <= total), default=total)
    trimmed = list(counts)
    for _ in range(excess):
        longest = max(range(len(trimmed)), key=trimmed.__getitem__)
        trimmed[longest] -= 1
    return trimmed


def drop_rejected(table: PageTable, blocks: BlockManager) -> None:
    """Release the pages reserved for rejected drafts, after the written positions."""
    blocks.rollback(table, table.num_written)
    assert not blocks.has_copies, "a sequence that decodes owns the page it writes"


def _decodes(item: ScheduledChunk) -> bool:
    return item.samples and item.stop - item.start == 1 and not item.parallel_samples


def _tokens_left(sequence: Sequence) -> int:
    return sequence.max_length - len(sequence.tokens)


def _reserve(item: ScheduledChunk, wanted: int, blocks: BlockManager) -> int:
    """Reserve pages for drafts; return the number of drafts that have pages."""
    table = item.sequence.table
    assert table is not None, f"{item.sequence.sequence_id} was planned without pages"
    if wanted > 0 and blocks.reserve(table, item.stop + wanted):
        return wanted
    return min(wanted, table.capacity - item.stop)


def draft_rows(step: SchedulerOutput) -> tuple[int, int] | None:
    """Return the numbers of sequences that get a token and of drafts; None for a step with prompts."""
    if step.plain:
        return len(step.work), 0
    num_drafts = 0
    for _, start, stop, samples, parallel_samples, drafts in step.work:
        if not samples or parallel_samples or stop - start != 1:
            return None
        num_drafts += len(drafts)
    return len(step.work), num_drafts
