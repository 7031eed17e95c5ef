"""The interface of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Proposal(NamedTuple):
    """Draft tokens, and the number of preceding tokens that support them."""

    tokens: Sequence[int] = ()
    match: int = 0


class Drafter(Protocol):
    """Drafts the next tokens of one sequence. Drafts affect only speed, not the output."""

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        """Return at most ``most`` drafts after ``tokens``, which extend those of every earlier call; none
        without a match."""
        ...
