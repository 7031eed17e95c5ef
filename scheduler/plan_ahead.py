"""The step after one whose tokens are not known yet."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.block_manager import BlockManager

from .latency_target import LatencyTarget
from .step_cost import shape_of
from .types import ScheduledChunk, SchedulerOutput, Sequence


def next_tokens(
    before: SchedulerOutput, running: Iterable[Sequence], blocks: BlockManager, latency: LatencyTarget | None
) -> SchedulerOutput | None:
    """One more token for each sequence of ``before``, which is planned and not committed.

    None unless that is all that each of them does, and all of ``running`` are among them and have room.

    Nobody is let in, preempted or copied in such a step, and it computes no prompt and no drafts. A
    sequence that is certain to end with the step before is not in it; of one that does end there, what
    it computes is dropped, and the room for it is given back with the sequence's own.
    """
    places: dict[Sequence, tuple[int, int]] = {}  # where each will stand, and which sample it gets
    for index, (sequence, _, stop, samples, parallel_samples, drafts) in enumerate(before.work):
        if not samples or parallel_samples or drafts:
            return None
        places[sequence] = stop, index
    work: list[ScheduledChunk] = []
    sources: list[int] = []
    for sequence in running:
        if (place := places.get(sequence)) is None or (table := sequence.table) is None:
            return None
        start, index = place
        if start + 1 >= sequence.max_length:
            continue
        if not blocks.reserve(table, start + 1):
            return None
        work.append(ScheduledChunk(sequence, start, start + 1, True))
        sources.append(index)
    if not work:
        return None
    shape = predicted_s = None
    if latency is not None:
        shape = shape_of(work)
        predicted_s = latency.predict(shape)
    return SchedulerOutput(
        tuple(work), predicted_s=predicted_s, shape=shape, sources=tuple(sources), plain=True
    )
