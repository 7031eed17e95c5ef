"""A step during planning."""

from __future__ import annotations

from .budget import TokenBudget
from .types import Lookup, ScheduledChunk, Sequence, StepShape


class StepDraft:
    """A step while it is planned: each phase of ``Scheduler.plan`` adds to it.

    work        scheduled chunks in batch order
    preempted   sequences preempted for this step
    lookups     prefix-cache results, one per sequence admitted for the first time
    chunks      running sequences that have more than one token to compute
    is_plain    the decodes compute generated tokens only, without drafts or waiting parallel samples
    has_drafts  drafts may have been added
    shape       shape of the decodes alone; None without a latency target
    budget      tokens left for work other than decodes; None if there is only decoding
    """

    __slots__ = (
        "budget",
        "chunks",
        "has_drafts",
        "is_plain",
        "lookups",
        "num_decodes",
        "preempted",
        "shape",
        "work",
    )
    budget: TokenBudget

    def __init__(self) -> None:
        """Begin with an empty step; written out because a dataclass takes twice as long."""
        self.work: list[ScheduledChunk] = []
        self.preempted: list[Sequence] = []
        self.lookups: list[Lookup] = []
        self.chunks: list[Sequence] = []
        self.is_plain, self.has_drafts, self.num_decodes = True, False, 0
        self.shape: StepShape | None = None

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
