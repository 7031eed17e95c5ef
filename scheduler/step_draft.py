"""A step while it is planned."""

from __future__ import annotations

from dataclasses import dataclass, field

from .budget import TokenBudget
from .types import Lookup, ScheduledChunk, Sequence, StepShape


@dataclass(slots=True, eq=False)
class StepDraft:
    """A step while it is planned: each phase of ``Scheduler.plan`` adds to it.

    work        chunks in batch order
    preempted   sequences that lost their pages or slots to it
    lookups     one per sequence that was admitted for the first time
    chunks      running sequences that have more than one token to compute
    is_plain    the decodes compute generated tokens only, without drafts or waiting parallel samples
    has_drafts  drafts may have been added
    shape       of the decodes alone; None without a latency target
    budget      tokens that are left for everything but decodes; only steps with more than decodes have one
    """

    work: list[ScheduledChunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    chunks: list[Sequence] = field(default_factory=list)
    is_plain: bool = True
    has_drafts: bool = False
    num_decodes: int = 0
    shape: StepShape | None = None
    budget: TokenBudget = field(init=False)

    def add_chunk(self, sequence: Sequence, granted: int, wanted: int) -> ScheduledChunk:
        """Add the next ``granted`` tokens of a sequence, which has ``wanted`` to compute."""
        start = sequence.num_written
        stop = start + granted
        samples = stop == len(sequence.tokens)
        waiting = tuple(sequence.parallel_samples) if samples else ()
        item = ScheduledChunk(sequence, start, stop, samples, waiting)
        self.work.append(item)
        self.budget.spend(sequence, granted, wanted)
        return item
