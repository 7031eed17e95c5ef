from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .hold_rates import MODEL


class Proposal(NamedTuple):
    """Draft tokens, and the number of matching tokens before them."""

    tokens: Sequence[int] = ()
    match: int = 0


class Drafter(Protocol):
    """Source of draft tokens for one sequence."""

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        """Return at most ``most`` drafts after ``tokens``. Later calls must extend ``tokens``."""
        ...


class ModelDrafter:
    def __init__(self) -> None:
        self.guesses: tuple[int, ...] = ()

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:  # noqa: ARG002 - the model had them
        guesses, self.guesses = self.guesses[:most], ()
        return Proposal(guesses, MODEL) if guesses else Proposal()
