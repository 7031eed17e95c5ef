"""What the scheduler asks of a queue of waiting sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Set

from ..types import ScheduledChunk, Sequence
from .age_order import AgeOrder


class WaitingQueue(ABC):
    """Sequences that wait to be let in, and the order among them; smaller priorities always come first.

    The order also says which of those that run gives way, and which gets on with its prompt first. A queue
    that keeps accounts is told what has been let in and computed.
    """

    def __init__(self, order: AgeOrder) -> None:
        """``order``: among those who wait with equal rights."""
        self._order = order

    def set_late(self, late: Set[Sequence]) -> None:
        """These, who never ran, can no longer have their first token when it is wanted.

        They give way to those who can, within what ``AgeOrder`` allows."""
        self._order.late = late

    @abstractmethod
    def offers(self) -> Iterator[Sequence]:
        """Those who may be let in now, in order. The one yielded last may be removed meanwhile."""

    @abstractmethod
    def __iter__(self) -> Iterator[Sequence]:
        """Everybody."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, sequence: object) -> bool: ...

    @abstractmethod
    def append(self, sequence: Sequence) -> None:
        """One that has not been let in yet: behind its equals."""

    @abstractmethod
    def put_back(self, sequence: Sequence) -> None:
        """One that ran and has to wait again: before its equals, but for those that ran before it did."""

    @abstractmethod
    def remove(self, sequence: Sequence) -> None: ...

    @abstractmethod
    def replace(self, sequence: Sequence, successor: Sequence) -> None:
        """``successor`` takes the place of a sequence that waits."""

    @abstractmethod
    def may_pass(self, blocked: Sequence, sequence: Sequence) -> bool:
        """Whether a sequence may be let in though ``blocked``, which comes before it, has to wait.

        ``blocked`` waits for a long prompt or for a page that is being computed. Nobody is passed for ever,
        see ``AgeOrder``."""

    @abstractmethod
    def holds_back(self, running: Sequence, sequence: Sequence) -> bool:
        """Whether a long prompt under way counts against another long one that waits."""

    @abstractmethod
    def short_rivals(self, running: Sequence) -> Iterable[Sequence]:
        """Waiting sequences for whose short prompts a long one under way leaves half of a step."""

    def first_claims(self, _running: Sequence) -> Iterable[Sequence]:
        """Waiting sequences that get on before a prompt under way: it takes what they leave."""
        return ()

    def ends_step(
        self, _sequence: Sequence, _work: abc.Sequence[ScheduledChunk], _next_one: Sequence | None = None
    ) -> bool:
        """Whether a step goes without a piece of this prompt.

        Then others, who get their first token in it, get it sooner: those in ``work``, or ``next_one``, which
        waits and has first claims."""
        return False

    def in_turn(self, running: list[Sequence]) -> list[Sequence]:
        """Prompts under way, oldest first: the order in which they get on."""
        return running

    def victim(self, candidates: list[Sequence], lost_work: Callable[[Sequence], int]) -> Sequence:
        """The one of these running sequences, oldest first, that gives way.

        Of the last priority, whoever loses least, and of those the youngest."""
        lowest = candidates[-1].priority
        equals = [sequence for sequence in reversed(candidates) if sequence.priority == lowest]
        return min(equals, key=lost_work)

    def precedes(self, _sequence: Sequence, _other: Sequence) -> bool:
        """Whether a sequence may take the slot of one of another tenant, which has more than its share."""
        return True

    def let_in(self, sequence: Sequence) -> None:  # noqa: B027
        """A sequence was removed because it runs now; its table says what was cached."""

    def planned(self, item: ScheduledChunk) -> None:  # noqa: B027
        """Part of a prompt is in the step: whatever happens to the sequence, it will be computed."""

    def computed(self, work: abc.Sequence[ScheduledChunk]) -> None:  # noqa: B027
        """A step is committed: tokens have been appended."""
