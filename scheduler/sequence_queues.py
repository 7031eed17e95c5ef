from __future__ import annotations

from dataclasses import replace

from .resources import Resource
from .types import Sequence, Status
from .waiting import WaitingQueue


class SlotShares:
    """Divides the slots among tenants; a slot is the right to run one sequence.

    Every tenant that has sequences gets an equal share of the slots, at least one slot. It may use more slots
    while no tenant below its share waits. Each parallel sample counts as a sequence.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.running: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        self.has_several_tenants = False
        self._present: dict[str, int] = {}
        self._is_uneven: bool | None = False

    def count_running(self, sequence: Sequence, change: int) -> None:
        self._count(self.running, sequence.tenant, change)

    def count_waiting(self, sequence: Sequence, change: int) -> None:
        self._count(self.waiting, sequence.tenant, change)

    def limit(self, num_slots: int) -> None:
        self.num_slots, self._is_uneven = num_slots, None

    @property
    def are_contended(self) -> bool:
        """Whether several tenants have sequences and at least one sequence waits."""
        return self.has_several_tenants and bool(self.waiting)

    @property
    def is_uneven(self) -> bool:
        """Whether one tenant is above its share while a tenant below its share waits."""
        if self._is_uneven is None:
            share, running = self.share, self.running
            self._is_uneven = (
                self.are_contended
                and max(running.values(), default=0) > share
                and any(running.get(tenant, 0) < share for tenant in self.waiting)
            )
        return self._is_uneven

    @property
    def share(self) -> int:
        """Number of slots that each tenant may claim."""
        return max(1, self.num_slots // max(1, len(self._present)))

    def is_below(self, tenant: str) -> bool:
        return self.running.get(tenant, 0) < self.share

    def is_above(self, tenant: str) -> bool:
        return self.running.get(tenant, 0) > self.share

    @property
    def num_claimed(self) -> int:
        """Number of slots that waiting sequences of tenants below their share may claim."""
        share = self.share
        running = self.running
        return sum([max(0, min(count, share - running.get(t, 0))) for t, count in self.waiting.items()])

    def must_yield(self, tenant: str, num_free: int) -> bool:
        """Return whether a tenant must leave the free slots to tenants below their share."""
        return self.are_contended and not self.is_below(tenant) and num_free <= self.num_claimed

    def _count(self, counts: dict[str, int], tenant: str, change: int) -> None:
        for each in (counts, self._present):
            left = each.get(tenant, 0) + change
            assert left >= 0, f"tenant {tenant!r} has a negative number of sequences"
            if left:
                each[tenant] = left
            else:
                del each[tenant]
        self.has_several_tenants = len(self._present) > 1
        self._is_uneven = None


class SequenceQueues:
    """The state of every sequence from its arrival to its end.

    ::

        load            enqueue          admit                 end
        ----> loading <---------> waiting -----> running -----------> finished
                      (or at once)   ^   preempt |      | fork          ^
                                     '-----------'      v               |
                                             parallel samples -- abort -'   (and from anywhere else)
    """

    def __init__(self, max_running: int, waiting: WaitingQueue) -> None:
        self.max_running = max_running
        self.loading: list[Sequence] = []
        self.waiting = waiting
        self.running: list[Sequence] = []
        self.successors: dict[Sequence, Sequence] = {}
        self.shares = SlotShares(max_running)
        self._num_admitted = 0

    @property
    def can_admit(self) -> bool:
        return len(self.running) < self.max_running and bool(self.waiting)

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a new sequence behind others of equal priority."""
        if sequence.status is Status.WAITING_FOR_PAGES:
            self.loading.remove(sequence)
            sequence.status = Status.WAITING
        self.waiting.append(sequence)
        self.shares.count_waiting(sequence, 1)

    def resume(self, sequence: Sequence) -> None:
        """Queue a sequence whose pages or image have arrived, before those that never ran."""
        self.loading.remove(sequence)
        self._put_back(sequence)

    def load(self, sequence: Sequence, status: Status = Status.WAITING_FOR_PAGES) -> None:
        """Let a sequence wait outside of the queue, until ``enqueue`` or ``resume``."""
        if sequence in self.waiting:
            self._leave_queue(sequence)
        self.loading.append(sequence)
        sequence.status = status
        if sequence.history.num_cached is None:
            sequence.history.num_admitted_before = self._num_admitted

    def admit(self, sequence: Sequence) -> None:
        """Let a waiting sequence run; it must hold every resource."""
        self._leave_queue(sequence)
        self.running.insert(_behind(self.running, sequence), sequence)
        self.shares.count_running(sequence, 1)
        sequence.status = Status.RUNNING
        sequence.history.num_overtaken = 0
        if sequence.history.num_cached is None:
            sequence.history.num_admitted_before = self._num_admitted
            self._num_admitted += 1
        self.waiting.on_admitted(sequence)

    def preempt(self, victim: Sequence, *, for_pages: bool = True) -> None:
        """Move a running sequence back to the queue, before others of its priority that never ran.

        Only preemptions for pages are counted; they make later admissions require more free pages.
        """
        victim.history.num_preempted += for_pages
        self._stop_running(victim)
        self._put_back(victim)

    def end(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.status = Status.FINISHED
            self.shares.count_running(sequence, -1)
        self.running = [sequence for sequence in self.running if sequence.status is Status.RUNNING]

    def abort(self, sequence: Sequence) -> None:
        """End a sequence; its first parallel sample, if any, replaces it."""
        runs = sequence.status is Status.RUNNING
        if sequence not in (self.running if runs else self.waiting):
            parents = (*self.running, *self.waiting, *self.loading)
            parent = next(s for s in parents if sequence in s.parallel_samples)
            parent.parallel_samples.remove(sequence)
        elif sequence.parallel_samples:
            successor, *successor.parallel_samples = sequence.parallel_samples
            sequence.parallel_samples = []
            if runs:
                self.running[self.running.index(sequence)] = successor
                self.successors[sequence] = successor
            else:
                self.waiting.replace(sequence, successor)
            successor.status = sequence.status
            _take_over(successor, sequence)
        elif runs:
            self._stop_running(sequence)
        else:
            self._leave_queue(sequence)
        sequence.status = Status.FINISHED

    def fork_samples(self, parent: Sequence, remaining: list[Sequence], resources: Resource) -> None:
        """Let parallel samples (``remaining``) continue after the first token of their parent.

        The first sample takes over the parent's table, and the others get forks. A sample without a fork is
        queued and recomputed.
        """
        if parent.table is not None:
            successor, *others = remaining
            if successor is not parent:
                self.running[self.running.index(parent)] = successor
                successor.status = Status.RUNNING
                _take_over(successor, parent)
            queued = [member for member in others if not self._fork(successor, member, resources)]
        else:
            self._stop_running(parent)
            queued = remaining
        for member in reversed(queued):
            member.history.digests = parent.digests.copy()
            member.history.num_admitted_before = parent.history.num_admitted_before
            self._put_back(member)

    def _put_back(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self.waiting.put_back(sequence)
        self.shares.count_waiting(sequence, 1)

    def _leave_queue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.shares.count_waiting(sequence, -1)

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.shares.count_running(sequence, -1)

    def _fork(self, successor: Sequence, member: Sequence, resources: Resource) -> bool:
        num_free = self.max_running - len(self.running)
        if not num_free or self.shares.must_yield(member.tenant, num_free):
            return False
        if not resources.fork(successor, member):
            return False
        member.history.num_admitted_before = successor.history.num_admitted_before
        member.status = Status.RUNNING
        self.running.insert(self.running.index(successor) + 1, member)
        self.shares.count_running(member, 1)
        return True


def _behind(queue: list[Sequence], sequence: Sequence) -> int:
    index = len(queue)
    while index and queue[index - 1].priority > sequence.priority:
        index -= 1
    return index


def _take_over(successor: Sequence, parent: Sequence) -> None:
    successor.table, parent.table = parent.table, None
    successor.history = replace(parent.history)
