"""Waiting sequences of each tenant of each priority: what the fair queues choose from."""

from __future__ import annotations

from abc import abstractmethod
from collections import abc, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from ..types import Sequence
from .age_order import AgeOrder
from .base import WaitingQueue

LOOK_AHEAD = 256  # waiting sequences that are looked at without being let in


@dataclass(slots=True)
class PriorityClass:
    """Everybody of one priority.

    lanes     of tenants that have something waiting: their sequences, the oldest first
    service   what each tenant has been charged
    level     what those who come back are lifted to, or up to which tenants may be served
    """

    lanes: dict[str, deque[Sequence]] = field(default_factory=dict)
    service: dict[str, float] = field(default_factory=dict)
    level: float = 0.0
    last_left: str | None = None  # the tenant whose lane was the last to become empty


class TenantLanes(WaitingQueue):
    """Tenants take turns inside each priority; who has the next turn is left to a subclass.

    Those that are late give way to others of their tenant, see ``AgeOrder``. A sequence that has to wait, for
    a long prompt of its own tenant or for a page that is being computed, is passed by its own tenant's
    only: nobody gains on a tenant whose turn it is.
    """

    def __init__(self, order: AgeOrder | None = None) -> None:
        super().__init__(order or AgeOrder())
        self._classes: dict[int, PriorityClass] = {}
        self._size = 0

    @abstractmethod
    def _choose(self, priority_class: PriorityClass) -> Iterator[Sequence]:
        """Those of a class who may be let in now; the one yielded last may be removed meanwhile."""

    @abstractmethod
    def _goes_first(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether a waiting sequence gets on before a prompt of another tenant that is under way."""

    def _begins_to_wait(self, _priority_class: PriorityClass, _tenant: str) -> None:
        """A tenant without waiting sequences has one again."""

    def offers(self) -> Iterator[Sequence]:
        for priority in sorted(self._classes):
            yield from self._choose(self._classes[priority])

    def __iter__(self) -> Iterator[Sequence]:
        for priority in sorted(self._classes):
            yield from chain.from_iterable(self._classes[priority].lanes.values())

    def __len__(self) -> int:
        return self._size

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and sequence in self._lane(sequence)

    def append(self, sequence: Sequence) -> None:
        self._open_lane(sequence).append(sequence)
        self._size += 1

    def put_back(self, sequence: Sequence) -> None:
        lane = self._open_lane(sequence)
        lane.insert(self._order.num_before(sequence, lane), sequence)
        self._size += 1
        self._order.interrupt(sequence)

    def remove(self, sequence: Sequence) -> None:
        lane = self._lane(sequence)
        self._order.leaves(sequence, lane)
        if lane[0] is sequence:
            lane.popleft()
        else:
            lane.remove(sequence)
        self._size -= 1
        if not lane:
            priority_class = self._class_of(sequence)
            del priority_class.lanes[sequence.tenant]
            priority_class.last_left = sequence.tenant

    def replace(self, sequence: Sequence, successor: Sequence) -> None:
        lane = self._lane(sequence)
        lane[lane.index(sequence)] = successor
        self._order.replace(sequence, successor)

    def may_pass(self, blocked: Sequence, sequence: Sequence) -> bool:
        return _are_equals(blocked, sequence) and self._order.may_pass(sequence, self._lane(sequence))

    def holds_back(self, running: Sequence, sequence: Sequence) -> bool:
        return running.priority < sequence.priority or _are_equals(running, sequence)

    def short_rivals(self, running: Sequence) -> Iterable[Sequence]:
        return islice(self._lane(running), LOOK_AHEAD)

    def first_claims(self, running: Sequence) -> Iterable[Sequence]:
        lanes = self._class_of(running).lanes
        others = (self._line(lane) for tenant, lane in lanes.items() if tenant != running.tenant)
        behind = (lane for lane in others if self._goes_first(lane[0], running))
        return islice(chain.from_iterable(behind), LOOK_AHEAD)

    def _line(self, lane: deque[Sequence]) -> abc.Sequence[Sequence]:
        """The first ``LOOK_AHEAD`` of a lane at least, in their order."""
        return self._order.in_order(islice(lane, LOOK_AHEAD)) if self._order.late else lane

    def _class_of(self, sequence: Sequence) -> PriorityClass:
        return self._class(sequence.priority)

    def _class(self, priority: int) -> PriorityClass:
        found = self._classes.get(priority)
        if found is None:
            found = self._classes[priority] = PriorityClass()
            self._forget_idle_classes()
        return found

    def _lane(self, sequence: Sequence) -> deque[Sequence]:
        """Of its tenant; an empty one that is not kept if nothing of that waits."""
        return self._class_of(sequence).lanes.get(sequence.tenant) or deque()

    def _open_lane(self, sequence: Sequence) -> deque[Sequence]:
        priority_class = self._class_of(sequence)
        lane = priority_class.lanes.get(sequence.tenant)
        if lane is None:
            self._begins_to_wait(priority_class, sequence.tenant)
            lane = priority_class.lanes[sequence.tenant] = deque()
        return lane

    def _forget_idle_classes(self) -> None:
        """Priorities are numbers of the caller's choice: accounts of a few idle ones are kept."""
        idle = [priority for priority, each in self._classes.items() if not each.lanes]
        for priority in idle[: max(0, len(idle) - MAX_IDLE_CLASSES - 1)]:  # the last one was just made
            del self._classes[priority]


MAX_IDLE_CLASSES = 64


def _are_equals(one: Sequence, other: Sequence) -> bool:
    """Whether two sequences are of one lane."""
    return (one.priority, one.tenant) == (other.priority, other.tenant)
