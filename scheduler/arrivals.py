from __future__ import annotations

from octavo.block_manager import BlockManager

from .limits import Limits
from .pages import Pages
from .preemption import lost_work
from .resources import Admission, Resource
from .sequence_queues import SequenceQueues
from .step_draft import StepDraft
from .types import Sequence, Status
from .waiting import LOOK_AHEAD, MAX_PASSED

SHARES_LOOK_AHEAD = LOOK_AHEAD // 16
"""A prompt that waits for a page computed in this step counts as this many of ``LOOK_AHEAD`` sequences."""

SLOT_REST = 32  # steps


class Arrivals:
    """Admits waiting sequences in order, while the step has tokens and all resources are free.

    Up to ``MAX_PASSED`` sequences may overtake a sequence that lacks a resource, such as a LoRA slot.
    """

    def __init__(
        self, blocks: BlockManager, limits: Limits, queues: SequenceQueues, resources: Resource, pages: Pages
    ) -> None:
        self.lacking: set[Sequence] = set()
        self._blocks = blocks
        self._limits = limits
        self._queues = queues
        self._resources = resources
        self._pages = pages
        self._passed: tuple[Sequence | None, int] = (None, 0)
        self._num_plans = 0
        self._displaced: dict[str, int] = {}

    def may_admit(self) -> bool:
        """Return whether a sequence might be admitted in this step."""
        if not self._queues.may_grow or not self._resources.may_admit():
            return False
        refused = self._pages.refused
        if refused is None and not self.lacking:
            return True
        offers = self._queues.waiting.offers()
        first = self._claimant() or next((each for each in offers if each not in self.lacking), None)
        return first is not None and first is not refused

    def plan(self, draft: StepDraft) -> None:
        """Admit waiting sequences in order, but only one long prompt at a time.

        A sequence waits one step if this step computes a page that it can share.
        """
        self._num_plans += 1
        if not self.may_admit():
            return
        waiting, budget = self._queues.waiting, draft.budget
        self._pages.begin_step(draft.work)
        claimant, is_short = self._claimant(), False
        long = [sequence for sequence in draft.chunks if budget.is_long(sequence)]
        passed = 0
        lacks: Sequence | None = None
        blocked: Sequence | None = None
        for sequence in waiting.offers():
            if not budget.left or len(self._queues.running) == self._limits.max_running:
                break
            if self._leaves_slot(sequence, claimant):
                is_short = True
                continue
            if passed >= LOOK_AHEAD or self._passed == (lacks, MAX_PASSED):
                break
            if blocked is not None and not waiting.may_pass(blocked, sequence):
                break
            is_long = budget.is_long(sequence)
            if is_long and (
                budget.long_ones_have_theirs or any(waiting.holds_back(other, sequence) for other in long)
            ):
                blocked, passed = blocked or sequence, passed + 1
                continue
            if self._limits.is_long_prompt(sequence.num_prompt) and waiting.ends_step(sequence, draft.work):
                break
            lacking = sequence in self.lacking
            outcome = Admission.LACKS if lacking else self._resources.hold(sequence)
            if outcome is Admission.STOP:
                is_short = True
                break
            if outcome is Admission.LACKS:
                if not self._resources.is_coming:
                    self.lacking.add(sequence)
                lacks, passed = lacks or sequence, passed + 1
            elif outcome is Admission.LACKS_MEDIA:
                self._queues.load(sequence, Status.WAITING_FOR_MEDIA)
            elif outcome is Admission.SHARES:
                blocked, passed = blocked or sequence, passed + SHARES_LOOK_AHEAD
            else:
                self._admit(sequence, draft)
                if lacks is not None:
                    self._passed = (lacks, self._passed[1] + 1 if self._passed[0] is lacks else 1)
                if is_long:
                    long.append(sequence)
            if sequence is claimant:
                claimant = self._claimant()
        if self._pages.is_short and not is_short:
            self._pages.is_short = False
            self._queues.shares.limit(self._limits.max_running)

    def _admit(self, sequence: Sequence, draft: StepDraft) -> None:
        wanted = sequence.backlog
        tokens = max(1, draft.budget.grant(sequence, wanted, self._queues.waiting.short_rivals(sequence)))
        self._queues.admit(sequence)
        if (lookup := self._pages.lookup(sequence)) is not None:
            draft.lookups.append(lookup)
        item = draft.add_chunk(sequence, tokens, wanted)
        self._queues.waiting.planned(item)
        self._pages.planned(item)

    def victims(self) -> list[Sequence]:
        """Return running sequences to preempt, because tenants below their share of slots wait.

        The oldest running sequence is never preempted.
        """
        queues, shares = self._queues, self._queues.shares
        if not shares.is_uneven or (claimant := self._claimant()) is None:
            return []
        share, num_running = shares.share, dict(shares.running)
        count = shares.num_claimed if not self._num_free else 1
        if self._num_free and self._resources.may_admit(claimant):
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
        """Record that a sequence lost its slot to another tenant."""
        self._displaced[victim.tenant] = self._num_plans

    def _claimant(self) -> Sequence | None:
        shares = self._queues.shares
        if not shares.are_claimed or (not self._pages.is_short and self._num_free > shares.num_claimed):
            return None
        below = (each for each in self._queues.waiting.offers() if shares.is_below(each.tenant))
        return next((each for each in below if each not in self.lacking), None)

    def _leaves_slot(self, sequence: Sequence, claimant: Sequence | None) -> bool:
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
