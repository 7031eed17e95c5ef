"""Planning of a step before the tokens of the previous step are known."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.block_manager import BlockManager

from .latency_target import LatencyTarget
from .step_cost import shape_of
from .types import ScheduledChunk, SchedulerOutput, Sequence


def next_tokens(
    before: SchedulerOutput, running: Iterable[Sequence], blocks: BlockManager, latency: LatencyTarget | None
) -> SchedulerOutput | None:
    """Return a step that computes one more token for each sequence of the uncommitted step ``before``.

    Return None unless ``before`` computes one token for every running sequence, and pages are left.

    Such a step admits, preempts and copies nothing, and has no prompts or drafts. A sequence that is certain
    to end with ``before`` is left out. For one that ends there unexpectedly, the result is dropped and its
    pages are released with the others.
    """
    places: dict[
        Sequence, tuple[int, int]
    ] = {}  # position of each sequence then, and the index of its sample
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
