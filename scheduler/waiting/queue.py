"""The queue of waiting sequences, oldest first or longest cached prefix first."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from itertools import chain, islice

from octavo.block_manager import BlockManager

from ..types import ScheduledChunk, Sequence
from .age_order import AgeOrder

LOOK_AHEAD = 256  # waiting sequences that a step may skip in search of one to admit
MAX_IDLE_CLASSES = 64


@dataclass(slots=True)
class PriorityClass:
    """Waiting sequences of one priority.

    lanes     by name: the sequences of each lane that is not empty, oldest first
    service   by tenant: the counter of ``FairQueue``
    level     in ``FairQueue``, the counter to which returning tenants are lifted; in ``DeficitQueue``, the
              counter up to which tenants may be served
    """

    lanes: dict[str, deque[Sequence]] = field(default_factory=dict)
    service: dict[str, float] = field(default_factory=dict)
    level: float = 0.0
    last_left: str | None = None  # the lane that became empty last


class WaitingQueue:
    """Sequences that wait for admission, ordered by priority, then by lane, then by ``AgeOrder``.

    A *lane* is a separate queue within a priority. This class has one lane per priority; subclasses have one
    per tenant, and choose the next lane by what each tenant has been served. If a sequence must wait for a
    long prompt, or for a page that is being computed, only sequences of its lane overtake it. The queue also
    chooses which running sequence is preempted, and in which order running prompts continue.
    """

    def __init__(self, blocks: BlockManager | None = None) -> None:
        """Begin without sequences.

        blocks   prefix cache. Among the first ``LOOK_AHEAD`` prompts of a priority, those with most cached
                 tokens come first, so that their pages are used before they are evicted. None: oldest first
        """
        self._order = AgeOrder(blocks)
        self._classes: dict[int, PriorityClass] = {}
        self._size = 0

    def set_late(self, late: Set[Sequence]) -> None:
        """Admit these sequences, which never ran, after those that can still meet their deadline.

        ``AgeOrder`` limits how often the late sequences are overtaken.
        """
        self._order.late = late

    def offers(self) -> Iterator[Sequence]:
        """Yield sequences that may be admitted now, in order. Callers may remove a yielded sequence."""
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
        """Put ``successor`` into the queue at the position of a waiting sequence, which leaves it."""
        lane = self._lane(sequence)
        lane[lane.index(sequence)] = successor
        self._order.replace(sequence, successor)

    def may_pass(self, blocked: Sequence, sequence: Sequence) -> bool:
        """Whether ``sequence`` may be admitted before ``blocked``, which precedes it in the queue.

        ``blocked`` waits for a long prompt or for a page that is being computed. ``AgeOrder`` limits how
        often ``blocked`` is overtaken.
        """
        return self._share_lane(blocked, sequence) and self._order.may_pass(sequence, self._lane(sequence))

    def holds_back(self, running: Sequence, sequence: Sequence) -> bool:
        """Whether ``sequence``, a long prompt, must wait for ``running``, another long prompt."""
        return running.priority < sequence.priority or self._share_lane(running, sequence)

    def short_rivals(self, _running: Sequence) -> Iterable[Sequence]:
        """Waiting sequences for which a running long prompt leaves half of a step if they are short."""
        return islice(self, LOOK_AHEAD)

    def first_claims(self, _running: Sequence) -> Iterable[Sequence]:
        """Waiting sequences that get their tokens of a step before a running prompt gets any."""
        return ()

    def ends_step(
        self, _sequence: Sequence, _work: abc.Sequence[ScheduledChunk], _next_one: Sequence | None = None
    ) -> bool:
        """Whether the step leaves out the chunk of this prompt, so that the step is shorter.

        That is for sequences that get their first token in the step: those in ``work``, or ``next_one``, a
        waiting sequence from ``first_claims``.
        """
        return False

    def in_turn(self, running: list[Sequence]) -> list[Sequence]:
        """Return the running prompts, which are given oldest first, in the order in which they continue."""
        return running

    def victim(self, candidates: list[Sequence], lost_work: Callable[[Sequence], int]) -> Sequence:
        """Choose the sequence to preempt among ``candidates``, which run and are given oldest first.

        Among those of the lowest priority, it is the one that loses the least work; the youngest of equals.
        """
        lowest = candidates[-1].priority
        equals = [sequence for sequence in reversed(candidates) if sequence.priority == lowest]
        return min(equals, key=lost_work)

    def precedes(self, _sequence: Sequence, _other: Sequence) -> bool:
        """Whether a sequence may take the slot of ``_other``, whose tenant is above its share of slots."""
        return True

    def let_in(self, sequence: Sequence) -> None:
        """Called when a sequence was admitted; its table has the cached prefix."""

    def planned(self, item: ScheduledChunk) -> None:
        """Called when a chunk of a prompt was added to the step; the chunk will certainly be computed."""

    def computed(self, work: abc.Sequence[ScheduledChunk]) -> None:
        """Called when a step is committed and its tokens have been appended."""

    def _lane_name(self, _sequence: Sequence) -> str:
        return ""

    def _choose(self, priority_class: PriorityClass) -> Iterator[Sequence]:
        """Yield sequences of a class that may be admitted now; callers may remove a yielded sequence."""
        lengths = self._order.lengths
        for lane in list(priority_class.lanes.values()):
            if lengths is not None:
                lengths.refresh(islice(lane, LOOK_AHEAD))
            yield from tuple(self._line(lane, by_length=lengths is not None))

    def _begins_to_wait(self, priority_class: PriorityClass, name: str) -> None:
        """Called before the first sequence is put into an empty lane."""

    def _line(self, lane: deque[Sequence], *, by_length: bool = False) -> abc.Sequence[Sequence]:
        """Return a lane with its first ``LOOK_AHEAD`` sequences in the order of ``AgeOrder``."""
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
        """Return the lane of a sequence, or an empty deque that is not kept if the lane does not exist."""
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
        for priority in idle[: max(0, len(idle) - MAX_IDLE_CLASSES - 1)]:  # the last one was just created
            del self._classes[priority]
