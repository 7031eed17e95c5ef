"""What every drafter can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Proposal(NamedTuple):
    """Guesses at the next tokens, and how many tokens before them speak for them."""

    tokens: Sequence[int] = ()
    match: int = 0


class Drafter(Protocol):
    """Guesses how one sequence goes on. A guess changes nothing but the time that tokens take."""

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        """At most ``most`` tokens that may follow ``tokens``, which begin with those of every call before;
        none where there is nothing to go by."""
        ...
