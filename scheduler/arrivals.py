"""Who is let in, with which part of its prompt, and who waits for what."""

from __future__ import annotations

import enum

from octavo.block_manager import BlockManager, Digest, Miss, PageTable

from .budget import TokenBudget
from .limits import Limits
from .preemption import has_headroom, lost_work
from .resumption import Resumption
from .sequence_queues import SequenceQueues
from .targets import Targets
from .types import Lookup, ScheduledChunk, Sequence, append_chunk
from .waiting import LOOK_AHEAD

SHARES_LOOK_AHEAD = LOOK_AHEAD // 16  # what looking up a waiting prompt counts as


SLOT_REST = 32  # plans during which a tenant that lost a slot to another leaves one slot free


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
        self._is_short = False  # there was no room for one more than ran then: so many slots there are
        self._num_plans = 0
        self._displaced: dict[str, int] = {}  # tenants that lost a slot to another, and in which plan

    def look_again(self) -> None:
        """Somebody has ended: what it would have grown by is free, even if it shared all it had."""
        self._refused = None

    def may_admit(self) -> bool:
        """Whether anybody may be let in; False where looking would cost time and find no room."""
        waiting, refused = self._queues.waiting, self._refused
        if not self._queues.may_grow or not self._targets.has_time():
            return False
        if refused is None or self._has_more_idle(refused[1]):
            return True
        first = self._claimant() or next(waiting.offers(), None)
        return first is not refused[0]

    def plan(
        self, chunks: list[Sequence], budget: TokenBudget, work: list[ScheduledChunk], lookups: list[Lookup]
    ) -> None:
        """Admit waiting sequences in their order, but one long prompt at a time.

        Others pass those that wait for it. Each gets pages for all it has to compute: a prompt that was let
        in does not run out of pages before its first token. One whose next page is computed in this very step
        waits for the next, where it shares that page, and is passed, too."""
        self._num_plans += 1
        if not self.may_admit():
            return
        waiting, filling = self._queues.waiting, self._filling(work)
        claimant, is_short = self._claimant(), False
        long = [sequence for sequence in chunks if budget.is_long(sequence)]
        passed = 0
        blocked: Sequence | None = None  # the first that was passed
        for sequence in waiting.offers():
            if not budget.left or len(self._queues.running) == self._limits.max_running:
                break
            if self._leaves_slot(sequence, claimant):
                is_short = True
                continue
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
            if sequence is claimant:
                claimant = self._claimant()
            if outcome is Admission.NO_ROOM:
                is_short = True
                break
            if outcome is Admission.SHARES:
                blocked, passed = blocked or sequence, passed + SHARES_LOOK_AHEAD
            elif is_long:
                long.append(sequence)
        if self._is_short and not is_short:
            self._is_short = False
            self._queues.shares.limit(self._limits.max_running)

    def victims(self) -> list[Sequence]:
        """Return running sequences whose slots go to waiting ones of tenants below their share.

        They are of tenants above their share, of no higher priority than the first one that waits, and never
        the oldest."""
        queues, shares = self._queues, self._queues.shares
        if not shares.is_uneven or (claimant := self._claimant()) is None:
            return []
        share, num_running = shares.share, dict(shares.running)
        count = shares.num_claimed if not self._num_free else 1
        if self._num_free and not self._is_refused(claimant) and self._targets.has_time(claimant):
            return []
        found: list[Sequence] = []
        waiting = queues.waiting
        candidates = [
            each
            for each in queues.running[1:]
            if num_running[each.tenant] > share
            and each.priority >= claimant.priority
            and waiting.precedes(claimant, each)
        ]
        lost = {each: lost_work(each, self._blocks) for each in candidates}
        while len(found) < count:
            above = dict.fromkeys(each.tenant for each in candidates if num_running[each.tenant] > share)
            if not above:
                break
            tenant = max(above, key=num_running.__getitem__)
            victim = waiting.victim([s for s in candidates if s.tenant == tenant], lost.__getitem__)
            candidates.remove(victim)
            num_running[tenant] -= 1
            found.append(victim)
        return found

    def displaced(self, victim: Sequence) -> None:
        """Note that a sequence lost its slot: its tenant leaves one slot free for a while."""
        self._displaced[victim.tenant] = self._num_plans

    def _claimant(self) -> Sequence | None:
        """Return the first waiting sequence of a tenant below its share, if others have to wait for it."""
        shares = self._queues.shares
        if not shares.are_claimed or (not self._is_short and self._num_free > shares.num_claimed):
            return None
        return next((each for each in self._queues.waiting.offers() if shares.is_below(each.tenant)), None)

    def _leaves_slot(self, sequence: Sequence, claimant: Sequence | None) -> bool:
        """Whether a waiting sequence leaves the next slot to another tenant.

        That tenant is below its share; or it was lately, has no request now, and would take the slot back
        with its next one. So one slot stays free during ``SLOT_REST`` plans that have one."""
        shares, tenant = self._queues.shares, sequence.tenant
        if claimant is not None and claimant.tenant != tenant and claimant.priority <= sequence.priority:
            return not shares.is_below(tenant) and self._queues.waiting.precedes(claimant, sequence)
        plan = self._displaced.get(tenant)
        if plan is None or len(shares.waiting) > 1:
            return False
        if self._num_plans - plan > SLOT_REST:
            del self._displaced[tenant]
            return False
        return self._num_free == 1 and tenant in shares.running

    @property
    def _num_free(self) -> int:
        return self._limits.max_running - len(self._queues.running)

    def _is_refused(self, sequence: Sequence) -> bool:
        """Whether there was no room for a sequence, and is not more now."""
        refused = self._refused
        return refused is not None and refused[0] is sequence and not self._has_more_idle(refused[1])

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
        if self._is_refused(sequence):
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
            self._is_short = True
            self._queues.shares.limit(max(1, len(self._queues.running)))
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
