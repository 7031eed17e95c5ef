from __future__ import annotations

from octavo.block_manager import BlockManager

from .limits import Limits
from .pages import Pages
from .preemption import lost_work
from .resources import Admission, Resource
from .sequence_queues import SequenceQueues
from .step_plan import StepPlan
from .types import Sequence, Status
from .waiting import HARD_MAX_OVERTAKEN, LOOK_AHEAD

SHARED_PAGE_LOOK_AHEAD = LOOK_AHEAD // 16
"""A prompt that waits for a page computed in this step counts as this many of ``LOOK_AHEAD`` sequences."""

SLOT_COOLDOWN = 32  # steps


class Admitter:
    """Admits waiting sequences in order, while the step has tokens and all resources are free.

    Up to ``HARD_MAX_OVERTAKEN`` sequences may overtake a sequence that lacks a resource, such as a LoRA slot.
    """

    def __init__(
        self, blocks: BlockManager, limits: Limits, queues: SequenceQueues, resources: Resource, pages: Pages
    ) -> None:
        self.without_resource: set[Sequence] = set()
        self._blocks = blocks
        self._limits = limits
        self._queues = queues
        self._resources = resources
        self._pages = pages
        self._passed: tuple[Sequence | None, int] = (None, 0)
        self._num_plans = 0
        self._preempted_at: dict[str, int] = {}

    def may_admit(self) -> bool:
        """Return whether a sequence might be admitted in this step."""
        if not self._queues.can_admit or not self._resources.may_admit():
            return False
        refused = self._pages.refused
        if refused is None and not self.without_resource:
            return True
        admission_order = self._queues.waiting.admission_order()
        first = self._next_below_share() or next(
            (each for each in admission_order if each not in self.without_resource), None
        )
        return first is not None and first is not refused

    def plan(self, plan: StepPlan) -> None:
        """Admit waiting sequences in order, but only one long prompt at a time.

        A sequence waits one step if this step computes a page that it can share.
        """
        self._num_plans += 1
        if not self.may_admit():
            return
        waiting, budget = self._queues.waiting, plan.budget
        self._pages.begin_step(plan.work)
        next_below_share, is_short = self._next_below_share(), False
        long = [sequence for sequence in plan.chunks if budget.is_long(sequence)]
        passed = 0
        lacks_resource: Sequence | None = None
        blocked: Sequence | None = None
        for sequence in waiting.admission_order():
            if not budget.left or len(self._queues.running) == self._limits.max_running:
                break
            if self._must_yield_slot(sequence, next_below_share):
                is_short = True
                continue
            if passed >= LOOK_AHEAD or self._passed == (lacks_resource, HARD_MAX_OVERTAKEN):
                break
            if blocked is not None and not waiting.may_overtake(blocked, sequence):
                break
            is_long = budget.is_long(sequence)
            if is_long and (
                budget.is_long_share_spent or any(waiting.delays(other, sequence) for other in long)
            ):
                blocked, passed = blocked or sequence, passed + 1
                continue
            if self._limits.is_long_prompt(sequence.num_prompt) and waiting.ends_step(sequence, plan.work):
                break
            without_resource = sequence in self.without_resource
            outcome = Admission.NO_RESOURCE if without_resource else self._resources.hold(sequence)
            if outcome is Admission.STOP:
                is_short = True
                break
            if outcome is Admission.NO_RESOURCE:
                if not self._resources.is_pending:
                    self.without_resource.add(sequence)
                lacks_resource, passed = lacks_resource or sequence, passed + 1
            elif outcome is Admission.NO_MEDIA:
                self._queues.load(sequence, Status.WAITING_FOR_MEDIA)
            elif outcome is Admission.PAGE_COMING:
                blocked, passed = blocked or sequence, passed + SHARED_PAGE_LOOK_AHEAD
            else:
                self._admit(sequence, plan)
                if lacks_resource is not None:
                    self._passed = (
                        lacks_resource,
                        self._passed[1] + 1 if self._passed[0] is lacks_resource else 1,
                    )
                if is_long:
                    long.append(sequence)
            if sequence is next_below_share:
                next_below_share = self._next_below_share()
        if self._pages.is_short and not is_short:
            self._pages.is_short = False
            self._queues.shares.limit(self._limits.max_running)

    def _admit(self, sequence: Sequence, plan: StepPlan) -> None:
        wanted = sequence.backlog
        tokens = max(1, plan.budget.grant(sequence, wanted, self._queues.waiting.waiting_prompts(sequence)))
        self._queues.admit(sequence)
        if (lookup := self._pages.lookup(sequence)) is not None:
            plan.lookups.append(lookup)
        item = plan.add_chunk(sequence, tokens, wanted)
        self._queues.waiting.on_planned(item)
        self._pages.on_planned(item)

    def victims(self) -> list[Sequence]:
        """Return running sequences to preempt, because tenants below their share of slots wait.

        The oldest running sequence is never preempted.
        """
        queues, shares = self._queues, self._queues.shares
        if not shares.is_uneven or (next_below_share := self._next_below_share()) is None:
            return []
        share, num_running = shares.share, dict(shares.running)
        count = shares.num_claimed if not self._num_free else 1
        if self._num_free and self._resources.may_admit(next_below_share):
            return []
        found: list[Sequence] = []
        waiting = queues.waiting
        candidates = [
            each
            for each in queues.running[1:]
            if num_running[each.tenant] > share
            and each.priority >= next_below_share.priority
            and waiting.has_precedence(next_below_share, each)
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

    def note_preempted(self, victim: Sequence) -> None:
        """Record that a sequence lost its slot to another tenant."""
        self._preempted_at[victim.tenant] = self._num_plans

    def _next_below_share(self) -> Sequence | None:
        shares = self._queues.shares
        if not shares.are_contended or (not self._pages.is_short and self._num_free > shares.num_claimed):
            return None
        below = (each for each in self._queues.waiting.admission_order() if shares.is_below(each.tenant))
        return next((each for each in below if each not in self.without_resource), None)

    def _must_yield_slot(self, sequence: Sequence, next_below_share: Sequence | None) -> bool:
        shares, tenant = self._queues.shares, sequence.tenant
        if (
            next_below_share is not None
            and next_below_share.tenant != tenant
            and next_below_share.priority <= sequence.priority
        ):
            return not shares.is_below(tenant) and self._queues.waiting.has_precedence(
                next_below_share, sequence
            )
        plan = self._preempted_at.get(tenant)
        if plan is None or len(shares.waiting) > 1:
            return False
        if self._num_plans - plan > SLOT_COOLDOWN:
            del self._preempted_at[tenant]
            return False
        return self._num_free == 1 and tenant in shares.running

    @property
    def _num_free(self) -> int:
        return self._limits.max_running - len(self._queues.running)
