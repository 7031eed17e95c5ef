"""What a computed step brings: tokens, full pages, and ends."""

from __future__ import annotations

from collections import abc

from octavo.block_manager import BlockManager

from .drafts import drop_rejected
from .types import SampleResult, ScheduledChunk, Sequence


def append_tokens(
    work: abc.Sequence[ScheduledChunk], results: abc.Sequence[SampleResult], blocks: BlockManager
) -> list[Sequence] | None:
    """Append one token to every sequence of a plain step; return those that have ended. None, and nothing is
    done, if a result is more than a token or none at all.

    As ``append_results`` would, without what cannot be in such a step. A named tuple is taken apart by
    its fields at five times the cost of a plain one, so results are by columns, and of rows only two fields
    are read.
    """
    assert len(results) == len(work), f"{len(results)} results for {len(work)} samples"
    tokens, finished, more, void = zip(*results, strict=True)
    if any(void) or any(more):
        return None
    commit_pages, page_size, has_states = blocks.commit, blocks.page_size, blocks.states is not None
    ended: list[Sequence] = []
    for item, token, is_last in zip(work, tokens, finished, strict=True):
        sequence = item[0]
        table = sequence.table
        if table is None:  # aborted while it was computed, or ended by the step before
            continue
        if token is None:
            ended.append(sequence)
            continue
        known = sequence.tokens
        known.append(token)
        stop = item[2]
        if stop % page_size and not has_states:
            table.num_written = stop  # within a page this is all that the call would do
        else:
            commit_pages(table, known, stop)
        if is_last or stop + 1 >= sequence.max_length:
            ended.append(sequence)
    return ended


def append_results(
    work: abc.Sequence[ScheduledChunk], results: abc.Sequence[SampleResult], blocks: BlockManager
) -> tuple[list[Sequence], list[tuple[ScheduledChunk, abc.Sequence[SampleResult]]]]:
    """Append the tokens of any step, and publish full pages; return those that have ended, and prompts with
    parallel samples, of which nothing is done yet, with their results."""
    commit_pages = blocks.commit
    ended: list[Sequence] = []
    groups: list[tuple[ScheduledChunk, abc.Sequence[SampleResult]]] = []
    index = 0
    for item in work:
        sequence, _, stop, samples, parallel_samples, drafts = item
        table = sequence.table
        if parallel_samples:
            first, index = index, index + samples + len(parallel_samples)
            groups.append((item, results[first:index]))
            continue
        if not samples:
            while table is None and sequence.successor is not None:
                # Aborted while it was computed: a recurrent state has gone on, for whoever has it now.
                sequence = sequence.successor
                table = sequence.table
            if table is not None:
                commit_pages(table, sequence.tokens, stop)
            continue
        token, finished, more, void = results[index]
        index += 1
        if void or table is None:  # aborted while it was computed, or ended by the step before
            continue
        if token is None:
            ended.append(sequence)
            continue
        tokens = sequence.tokens
        tokens.append(token)
        if more:
            tokens += more
            stop += len(more)
        commit_pages(table, tokens, stop)
        if drafts and len(more) < len(drafts):
            drop_rejected(table, blocks)
        if finished or len(tokens) >= sequence.max_length:
            ended.append(sequence)
    assert index == len(results), f"{len(results)} results for {index} samples"
    return ended, groups
