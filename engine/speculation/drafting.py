"""What one sample drafts, beside each of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..api.sampling_params import Speculate
from .drafter import Drafter
from .ngram import NgramDrafter

_DRAFTERS: Mapping[Speculate, Callable[[], Drafter]] = {"ngram": NgramDrafter}


class Drafting:
    """A sample's drafter, and how much of it is asked for.

    num_drafted    drafts that were computed
    num_accepted   of these, those that held
    """

    __slots__ = ("_drafter", "_most", "num_accepted", "num_drafted")

    def __init__(self, drafter: Drafter, *, most: int) -> None:
        self._drafter = drafter
        self._most = most
        self.num_drafted = 0
        self.num_accepted = 0

    def propose(self, tokens: Sequence[int], room: int) -> tuple[int, ...]:
        """Guesses at what follows ``tokens``, of which ``room`` more may follow."""
        most = min(self._most, room - 1)  # after the last guess a token is drawn in any case
        return tuple(self._drafter.propose(tokens, most)) if most > 0 else ()

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """A step computed so many drafts, and the first ``num_accepted`` of them held."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted


def begin_drafting(speculate: Speculate, *, most: int) -> Drafting | None:
    """For a new sample; None if it does not draft."""
    make = _DRAFTERS.get(speculate)
    return None if make is None else Drafting(make(), most=most)
