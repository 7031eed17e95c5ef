from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.block_manager import BlockManager

from .budget import TokenBudget
from .latency_target import LatencyTarget
from .step_cost import shape_of
from .types import Lookup, ScheduledChunk, SchedulerOutput, Sequence, StepShape


@dataclass(slots=True)
class StepPlan:
    work: list[ScheduledChunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    chunks: list[Sequence] = field(default_factory=list)
    num_decodes: int = 0
    is_decode_only: bool = True
    has_drafts: bool = False
    shape: StepShape | None = None
    budget: TokenBudget = field(init=False)

    def add_chunk(self, sequence: Sequence, granted: int, wanted: int) -> ScheduledChunk:
        start = sequence.num_written
        stop = start + granted
        samples = stop == len(sequence.tokens)
        waiting = tuple(sequence.parallel_samples) if samples else ()
        item = ScheduledChunk(sequence, start, stop, samples, waiting)
        self.work.append(item)
        self.budget.spend(sequence, granted, wanted)
        return item


def next_tokens(
    before: SchedulerOutput, running: Iterable[Sequence], blocks: BlockManager, latency: LatencyTarget | None
) -> SchedulerOutput | None:
    """Return a step that computes one more token for each sequence of the uncommitted step ``before``.

    Return None unless ``before`` samples one token for every running sequence, and pages are left. Sequences
    that are certain to end with ``before`` are left out.
    """
    places: dict[Sequence, tuple[int, int]] = {}
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
        tuple(work), predicted_s=predicted_s, shape=shape, sources=tuple(sources), decode_only=True
    )
