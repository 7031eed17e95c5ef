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
    queues: dict[str, deque[Sequence]] = field(default_factory=dict)
    service: dict[str, float] = field(default_factory=dict)
    level: float = 0.0
    last_left: str | None = None


class WaitingQueue:
    """Sequences that wait for admission, ordered by priority, queue and ``AgeOrder``.

    This class has one queue per priority; subclasses have one per priority and tenant. It also chooses which
    running sequence is preempted, and the order of running prompts.
    """

    def __init__(self, blocks: BlockManager | None = None) -> None:
        """Begin without sequences.

        blocks   prefix cache; prompts with most cached tokens come first (None: oldest first)
        """
        self._order = AgeOrder(blocks)
        self._classes: dict[int, PriorityClass] = {}
        self._size = 0

    def set_late(self, late: Set[Sequence]) -> None:
        """Admit these sequences after those that can still meet their deadline."""
        self._order.late = late

    def admission_order(self) -> Iterator[Sequence]:
        """Yield sequences that may be admitted now, in order. Callers may remove a yielded sequence."""
        for priority in sorted(self._classes):
            yield from self._choose(self._classes[priority])

    def __iter__(self) -> Iterator[Sequence]:
        for priority in sorted(self._classes):
            yield from chain.from_iterable(self._classes[priority].queues.values())

    def __len__(self) -> int:
        return self._size

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and sequence in self._queue(sequence)

    def append(self, sequence: Sequence) -> None:
        """Add a sequence that was never admitted, behind the others of its queue."""
        self._open_queue(sequence).append(sequence)
        self._size += 1

    def put_back(self, sequence: Sequence) -> None:
        """Add a preempted sequence before those of its queue that were never admitted."""
        queue = self._open_queue(sequence)
        queue.insert(self._order.num_before(sequence, queue), sequence)
        self._size += 1
        self._order.mark_preempted(sequence)

    def remove(self, sequence: Sequence) -> None:
        queue = self._queue(sequence)
        self._order.remove(sequence, queue)
        queue.remove(sequence)
        self._size -= 1
        if not queue:
            priority_class, name = self._class(sequence.priority), self._queue_name(sequence)
            del priority_class.queues[name]
            priority_class.last_left = name

    def replace(self, sequence: Sequence, successor: Sequence) -> None:
        queue = self._queue(sequence)
        queue[queue.index(sequence)] = successor
        self._order.replace(sequence, successor)

    def may_overtake(self, blocked: Sequence, sequence: Sequence) -> bool:
        """Return whether ``sequence`` may overtake ``blocked``, which waits for a long prompt or a page."""
        return self._share_queue(blocked, sequence) and self._order.may_overtake(
            sequence, self._queue(sequence)
        )

    def delays(self, running: Sequence, sequence: Sequence) -> bool:
        """Return whether the long prompt ``sequence`` must wait for the long prompt ``running``."""
        return running.priority < sequence.priority or self._share_queue(running, sequence)

    def waiting_prompts(self, _running: Sequence) -> Iterable[Sequence]:
        return islice(self, LOOK_AHEAD)

    def served_less(self, _running: Sequence) -> Iterable[Sequence]:
        return ()

    def ends_step(
        self, _sequence: Sequence, _work: abc.Sequence[ScheduledChunk], _next_one: Sequence | None = None
    ) -> bool:
        """Return whether the step leaves out this prompt's chunk, so that the step is shorter."""
        return False

    def prefill_order(self, running: list[Sequence]) -> list[Sequence]:
        """Return the running prompts in the order in which they continue."""
        return running

    def victim(self, candidates: list[Sequence], lost_work: Callable[[Sequence], int]) -> Sequence:
        """Return the sequence to preempt: lowest priority, then least lost work."""
        lowest = candidates[-1].priority
        equals = [sequence for sequence in reversed(candidates) if sequence.priority == lowest]
        return min(equals, key=lost_work)

    def has_precedence(self, _sequence: Sequence, _other: Sequence) -> bool:
        return True

    def on_admitted(self, sequence: Sequence) -> None:
        """Record that a sequence was admitted; its table has the cached prefix."""

    def on_planned(self, item: ScheduledChunk) -> None:
        """Record that a chunk of a prompt was added to the step."""

    def on_computed(self, work: abc.Sequence[ScheduledChunk]) -> None:
        """Record that a step is committed and its tokens are appended."""

    def _queue_name(self, _sequence: Sequence) -> str:
        return ""

    def _choose(self, priority_class: PriorityClass) -> Iterator[Sequence]:
        lengths = self._order.lengths
        for queue in list(priority_class.queues.values()):
            if lengths is not None:
                lengths.refresh(islice(queue, LOOK_AHEAD))
            yield from tuple(self._ordered(queue, by_length=lengths is not None))

    def _on_tenant_waiting(self, priority_class: PriorityClass, name: str) -> None: ...

    def _ordered(self, queue: deque[Sequence], *, by_length: bool = False) -> abc.Sequence[Sequence]:
        if not (by_length or self._order.late):
            return queue
        return [*self._order.in_order(islice(queue, LOOK_AHEAD)), *islice(queue, LOOK_AHEAD, None)]

    def _share_queue(self, one: Sequence, other: Sequence) -> bool:
        return one.priority == other.priority and self._queue_name(one) == self._queue_name(other)

    def _class(self, priority: int) -> PriorityClass:
        found = self._classes.get(priority)
        if found is None:
            found = self._classes[priority] = PriorityClass()
            self._forget_idle_classes()
        return found

    def _queue(self, sequence: Sequence) -> deque[Sequence]:
        return self._class(sequence.priority).queues.get(self._queue_name(sequence)) or deque()

    def _open_queue(self, sequence: Sequence) -> deque[Sequence]:
        priority_class, name = self._class(sequence.priority), self._queue_name(sequence)
        queue = priority_class.queues.get(name)
        if queue is None:
            self._on_tenant_waiting(priority_class, name)
            queue = priority_class.queues[name] = deque()
        return queue

    def _forget_idle_classes(self) -> None:
        idle = [priority for priority, each in self._classes.items() if not each.queues]
        for priority in idle[: max(0, len(idle) - MAX_IDLE_CLASSES - 1)]:
            del self._classes[priority]
