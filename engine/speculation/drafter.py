from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .acceptance_rates import MODEL


class Proposal(NamedTuple):
    """Draft tokens, and the number of matching tokens before them."""

    tokens: Sequence[int] = ()
    match: int = 0


class Drafter(Protocol):
    """Source of draft tokens for one sequence."""

    def propose(self, tokens: Sequence[int], max_drafts: int) -> Proposal:
        """Return at most ``max_drafts`` drafts after ``tokens``. Later calls must extend ``tokens``."""
        ...


class ModelDrafter:
    def __init__(self) -> None:
        self.drafts: tuple[int, ...] = ()

    def propose(self, tokens: Sequence[int], max_drafts: int) -> Proposal:  # noqa: ARG002 - the model had them
        drafts, self.drafts = self.drafts[:max_drafts], ()
        return Proposal(drafts, MODEL) if drafts else Proposal()
