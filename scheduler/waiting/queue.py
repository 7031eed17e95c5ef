"""The queue of waiting sequences, oldest first or longest cached prefix first."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from itertools import chain, islice

from octavo.block_manager import BlockManager

from ..types import ScheduledChunk, Sequence
from .age_order import AgeOrder

LOOK_AHEAD = 256  # waiting sequences that a plan searches without admitting them
MAX_IDLE_CLASSES = 64


@dataclass(slots=True)
class PriorityClass:
    """Waiting sequences of one priority.

    lanes     non-empty lanes by name: their sequences, the oldest first
    service   charges of each tenant, if tenants take turns by them
    level     counter to which returning tenants are lifted, or up to which tenants may be served
    """

    lanes: dict[str, deque[Sequence]] = field(default_factory=dict)
    service: dict[str, float] = field(default_factory=dict)
    level: float = 0.0
    last_left: str | None = None  # the lane that became empty last


class WaitingQueue:
    """Sequences that wait for admission: by priority, then by lane, then by ``AgeOrder``.

    A lane is a separate queue within a priority: one for all sequences here, one per tenant in subclasses,
    which choose the next lane and keep accounts. A sequence that has to wait for a long prompt or for a page
    that is being computed is overtaken only by sequences of its lane. The queue also chooses the running
    sequence that is preempted, and the prompt that continues first.
    """

    def __init__(self, blocks: BlockManager | None = None) -> None:
        """Begin without sequences.

        blocks   prefix cache: among the first ``LOOK_AHEAD`` prompts of a priority, those with most cached
                 tokens come first, so that pages are used before they are evicted (None: oldest first)
        """
        self._order = AgeOrder(blocks)
        self._classes: dict[int, PriorityClass] = {}
        self._size = 0

    def set_late(self, late: Set[Sequence]) -> None:
        """Admit these sequences after those that can still meet the target of their first token.

        None of them ran before; ``AgeOrder`` limits how often they are overtaken.
        """
        self._order.late = late

    def offers(self) -> Iterator[Sequence]:
        """Sequences that may be admitted now, in order. The last one may be removed before the next."""
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
        """Add a sequence that was never admitted, behind the others of its lane."""
        self._open_lane(sequence).append(sequence)
        self._size += 1

    def put_back(self, sequence: Sequence) -> None:
        """Add a preempted sequence, before sequences of its lane that never ran or were admitted later."""
        lane = self._open_lane(sequence)
        lane.insert(self._order.num_before(sequence, lane), sequence)
        self._size += 1
        self._order.interrupt(sequence)

    def remove(self, sequence: Sequence) -> None:
        lane = self._lane(sequence)
        self._order.leaves(sequence, lane)
        lane.remove(sequence)
        self._size -= 1
        if not lane:
            priority_class, name = self._class(sequence.priority), self._lane_name(sequence)
            del priority_class.lanes[name]
            priority_class.last_left = name

    def replace(self, sequence: Sequence, successor: Sequence) -> None:
        """Give the place of a waiting sequence to ``successor``."""
        lane = self._lane(sequence)
        lane[lane.index(sequence)] = successor
        self._order.replace(sequence, successor)

    def may_pass(self, blocked: Sequence, sequence: Sequence) -> bool:
        """Whether a sequence may be admitted before ``blocked``, which precedes it but has to wait.

        ``blocked`` waits for a long prompt or for a page that is being computed. ``AgeOrder`` limits how
        often it is overtaken.
        """
        return self._share_lane(blocked, sequence) and self._order.may_pass(sequence, self._lane(sequence))

    def holds_back(self, running: Sequence, sequence: Sequence) -> bool:
        """Whether a running long prompt counts against another long prompt that waits."""
        return running.priority < sequence.priority or self._share_lane(running, sequence)

    def short_rivals(self, _running: Sequence) -> Iterable[Sequence]:
        """Waiting sequences with short prompts, for which a running long prompt leaves half of a step."""
        return islice(self, LOOK_AHEAD)

    def first_claims(self, _running: Sequence) -> Iterable[Sequence]:
        """Waiting sequences that take their tokens of a step before a running prompt does."""
        return ()

    def ends_step(
        self, _sequence: Sequence, _work: abc.Sequence[ScheduledChunk], _next_one: Sequence | None = None
    ) -> bool:
        """Whether a step computes no chunk of this running prompt.

        The step is then shorter for sequences that get their first token in it: those in ``work``, or
        ``next_one``, which waits and has first claims.
        """
        return False

    def in_turn(self, running: list[Sequence]) -> list[Sequence]:
        """Return running prompts, given oldest first, in the order in which they continue."""
        return running

    def victim(self, candidates: list[Sequence], lost_work: Callable[[Sequence], int]) -> Sequence:
        """Choose the sequence to preempt among running ones, oldest first.

        It is the one of the lowest priority that loses the least work, the youngest among equals.
        """
        lowest = candidates[-1].priority
        equals = [sequence for sequence in reversed(candidates) if sequence.priority == lowest]
        return min(equals, key=lost_work)

    def precedes(self, _sequence: Sequence, _other: Sequence) -> bool:
        """Whether a sequence may take the slot of another tenant's sequence, which is above its share."""
        return True

    def let_in(self, sequence: Sequence) -> None:
        """Note that a sequence was admitted; its table shows the cached prefix."""

    def planned(self, item: ScheduledChunk) -> None:
        """Note that a chunk of a prompt is in the step and will be computed in any case."""

    def computed(self, work: abc.Sequence[ScheduledChunk]) -> None:
        """Note that a step is committed and its tokens have been appended."""

    def _lane_name(self, _sequence: Sequence) -> str:
        return ""

    def _choose(self, priority_class: PriorityClass) -> Iterator[Sequence]:
        """Yield sequences of a class that may be admitted now; the last one may be removed in between."""
        lengths = self._order.lengths
        for lane in list(priority_class.lanes.values()):
            if lengths is not None:
                lengths.refresh(islice(lane, LOOK_AHEAD))
            yield from tuple(self._line(lane, by_length=lengths is not None))

    def _begins_to_wait(self, priority_class: PriorityClass, name: str) -> None:
        """Prepare for the first sequence of a lane."""

    def _line(self, lane: deque[Sequence], *, by_length: bool = False) -> abc.Sequence[Sequence]:
        """Return a lane with its first ``LOOK_AHEAD`` sequences in their order."""
        if not (by_length or self._order.late):
            return lane
        return [*self._order.in_order(islice(lane, LOOK_AHEAD)), *islice(lane, LOOK_AHEAD, None)]

    def _share_lane(self, one: Sequence, other: Sequence) -> bool:
        return one.priority == other.priority and self._lane_name(one) == self._lane_name(other)

    def _class(self, priority: int) -> PriorityClass:
        found = self._classes.get(priority)
        if found is None:
            found = self._classes[priority] = PriorityClass()
            self._forget_idle_classes()
        return found

    def _lane(self, sequence: Sequence) -> deque[Sequence]:
        """Return the lane of a sequence; a new empty one, not kept, if it does not exist."""
        return self._class(sequence.priority).lanes.get(self._lane_name(sequence)) or deque()

    def _open_lane(self, sequence: Sequence) -> deque[Sequence]:
        priority_class, name = self._class(sequence.priority), self._lane_name(sequence)
        lane = priority_class.lanes.get(name)
        if lane is None:
            self._begins_to_wait(priority_class, name)
            lane = priority_class.lanes[name] = deque()
        return lane

    def _forget_idle_classes(self) -> None:
        """Drop all but a few idle priorities, because clients can choose any number as a priority."""
        idle = [priority for priority, each in self._classes.items() if not each.lanes]
        for priority in idle[: max(0, len(idle) - MAX_IDLE_CLASSES - 1)]:  # the last one is new
            del self._classes[priority]
