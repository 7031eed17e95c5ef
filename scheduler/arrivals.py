"""Who is let in, with which part of its prompt, and who waits for what."""

from __future__ import annotations

import enum

from octavo.block_manager import BlockManager, Digest, Miss, PageTable

from .budget import TokenBudget
from .limits import Limits
from .preemption import has_headroom
from .resumption import Resumption
from .sequence_queues import SequenceQueues
from .targets import Targets
from .types import Lookup, ScheduledChunk, Sequence, append_chunk
from .waiting import LOOK_AHEAD

SHARES_LOOK_AHEAD = LOOK_AHEAD // 16  # what looking up a waiting prompt counts as


class Admission(enum.Enum):
    """What became of a sequence that waits."""

    LET_IN = enum.auto()
    NO_ROOM = enum.auto()  # nor for anybody after it
    SHARES = enum.auto()  # its next page is being computed


class Arrivals:
    """Lets waiting sequences in, in their order.

    As long as tokens of the step, pages, and time for their decodes are left. Whoever found no pages is
    remembered, so that nobody looks again before some are free.
    """

    def __init__(
        self,
        blocks: BlockManager,
        limits: Limits,
        queues: SequenceQueues,
        resumption: Resumption,
        targets: Targets,
    ) -> None:
        self._blocks = blocks
        self._limits = limits
        self._queues = queues
        self._resumption = resumption
        self._targets = targets
        self._refused: tuple[Sequence, tuple[int, ...]] | None = None  # who, and the idle pages then

    def look_again(self) -> None:
        """Somebody has ended: what it would have grown by is free, even if it shared all it had."""
        self._refused = None

    def may_admit(self) -> bool:
        """Whether anybody may be let in; False where looking would cost time and find no room."""
        waiting, refused = self._queues.waiting, self._refused
        if not self._queues.may_grow or not self._targets.has_time():
            return False
        return (
            refused is None
            or self._has_more_idle(refused[1])
            or next(waiting.offers(), None) is not refused[0]
        )

    def plan(
        self, chunks: list[Sequence], budget: TokenBudget, work: list[ScheduledChunk], lookups: list[Lookup]
    ) -> None:
        """Admit waiting sequences in their order, but one long prompt at a time.

        Others pass those that wait for it. Each gets pages for all it has to compute: a prompt that was let
        in does not run out of pages before its first token. One whose next page is computed in this very step
        waits for the next, where it shares that page, and is passed, too."""
        if not self.may_admit():
            return
        waiting, filling = self._queues.waiting, self._filling(work)
        long = [sequence for sequence in chunks if budget.is_long(sequence)]
        passed = 0
        blocked: Sequence | None = None  # the first that was passed
        for sequence in waiting.offers():
            if not budget.left or len(self._queues.running) == self._limits.max_running:
                break
            if blocked is not None and (passed >= LOOK_AHEAD or not waiting.may_pass(blocked, sequence)):
                break
            is_long = budget.is_long(sequence)
            if is_long and (
                budget.long_ones_have_theirs or any(waiting.holds_back(other, sequence) for other in long)
            ):
                blocked, passed = blocked or sequence, passed + 1
                continue
            if self._limits.is_long_prompt(sequence.num_prompt) and waiting.ends_step(sequence, work):
                break
            outcome = self._admit(sequence, budget, work, lookups, filling)
            if outcome is Admission.NO_ROOM:
                break
            if outcome is Admission.SHARES:
                blocked, passed = blocked or sequence, passed + SHARES_LOOK_AHEAD
            elif is_long:
                long.append(sequence)

    def _admit(
        self,
        sequence: Sequence,
        budget: TokenBudget,
        work: list[ScheduledChunk],
        lookups: list[Lookup],
        filling: set[Digest],
    ) -> Admission:
        """Let a waiting sequence in, or say what it waits for."""
        if self._resumption.holds_up(sequence) or not self._targets.has_time(sequence):
            return Admission.NO_ROOM
        if self._refused and self._refused[0] is sequence and not self._has_more_idle(self._refused[1]):
            return Admission.NO_ROOM
        blocks, find = self._blocks, not sequence.skip_prefix_cache
        table = blocks.open(sequence.tokens, salt=sequence.salt, digests=sequence.digests, find=find)
        if find and _next_digest(table) in filling:
            blocks.close(table)
            return Admission.SHARES  # from the next step on it finds what this one computes
        miss = None
        if sequence.num_cached is None:  # explained before pages are evicted for it
            miss = blocks.explain_miss(table, sequence.tokens) if find else Miss(0, "disabled")
        wanted = len(sequence.tokens) - table.num_written
        rivals = self._queues.waiting.short_rivals(sequence)
        tokens = max(1, budget.grant(sequence, wanted, rivals))
        may_grow = has_headroom(sequence, table, self._queues.running, blocks)
        if not may_grow or not blocks.reserve(table, table.num_written + tokens, ahead=len(sequence.tokens)):
            blocks.close(table)
            self._refused = (sequence, blocks.idle_pages())
            return Admission.NO_ROOM
        if self._resumption.begin(sequence):
            blocks.close(table)
            return Admission.NO_ROOM  # for others: it is this one's, when its pages are there
        self._queues.admit(sequence, table)
        self._refused = None
        if miss is not None:
            sequence.num_cached = hit = table.num_written
            misses = blocks.miss_reasons.count(len(sequence.tokens), miss)
            lookups.append(Lookup(sequence, len(sequence.tokens), hit, misses, miss))
        budget.spend(sequence, append_chunk(work, sequence, tokens), wanted)
        self._queues.waiting.planned(work[-1])
        filling |= self._filling(work[-1:])
        return Admission.LET_IN

    def _has_more_idle(self, before: tuple[int, ...]) -> bool:
        """Whether some group has more idle pages than it had."""
        return any(now > then for now, then in zip(self._blocks.idle_pages(), before, strict=True))

    def _filling(self, work: list[ScheduledChunk]) -> set[Digest]:
        """Digests of the prompt pages that this step fills, or begins to."""
        page_size = self._blocks.page_size
        filling: set[Digest] = set()
        for sequence, start, stop, samples, *_ in work:
            if stop - start > 1 or not samples:
                assert sequence.table is not None
                filling.update(sequence.table.digests[start // page_size : -(-stop // page_size)])
        return filling


def _next_digest(table: PageTable) -> Digest | None:
    """Of the first page a look-up did not find; None if nothing was left to look up."""
    index = len(table.pages)
    return table.digests[index] if index < len(table.digests) else None
