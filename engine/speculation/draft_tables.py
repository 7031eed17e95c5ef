from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo.block_manager import BlockManager, PageTable
from octavo.kernels.metadata import Ints
from octavo.scheduler import SchedulerOutput
from octavo.scheduler import Sequence as Served

from ..executor.sampling.sampler import SampleState

States = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class DraftState:
    sequence: Served
    draft_sequence: Served | None = None
    failed: bool = False
    inputs: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Request for ``count`` drafts after ``tokens``."""

    draft_state: DraftState
    tokens: Sequence[int]
    state: SampleState
    count: int


class Average:
    def __init__(self) -> None:
        self.value = 0.0

    def add(self, seconds: float) -> None:
        self.value += (0.1 if self.value else 1.0) * (seconds - self.value)


class BatchDrafter(ABC):
    """Drafter for many samples at once, with its own pages. Used only on the engine's thread."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.round_s = Average()
        self._recent: dict[DraftState, None] = {}

    def rows_of(self, step: SchedulerOutput) -> Ints | None:  # noqa: ARG002
        """Return the ascending rows of a step whose hidden states the drafter needs, if any."""
        return None

    def record(self, states: States) -> None:
        """Record the hidden states [P, D] of the rows that ``rows_of`` returned."""
        raise AssertionError(f"{len(states)} hidden states for a drafter that does not read hidden states")

    def begin(self, sequence: Served) -> DraftState:
        return DraftState(sequence)

    @abstractmethod
    def draft(self, requests: Iterable[DraftRequest]) -> list[tuple[int, ...]]:
        """Return drafts for each sample; fewer if pages are short."""

    def close(self, draft_state: DraftState) -> None:
        self.close_table(draft_state)

    def close_table(self, draft_state: DraftState) -> None:
        self._recent.pop(draft_state, None)
        if draft_state.draft_sequence is not None and draft_state.draft_sequence.table is not None:
            self.blocks.close(draft_state.draft_sequence.table)
        draft_state.draft_sequence = None

    def shut_down(self) -> None:
        for draft_state in list(self._recent):
            self.close(draft_state)

    def open_table(self, draft_state: DraftState, tokens: Sequence[int]) -> PageTable:
        if draft_state.draft_sequence is None:
            salt = draft_state.sequence.salt
            draft_state.draft_sequence = Served("draft", list(tokens), 1, salt=salt)
            draft_state.draft_sequence.table = self.blocks.open(draft_state.draft_sequence.tokens, salt=salt)
        self._recent.pop(draft_state, None)
        self._recent[draft_state] = None
        assert draft_state.draft_sequence.table is not None
        return draft_state.draft_sequence.table

    def reserve(self, draft_state: DraftState, num_tokens: int, busy: Container[DraftState]) -> bool:
        assert draft_state.draft_sequence is not None
        assert draft_state.draft_sequence.table is not None
        while not self.blocks.reserve(draft_state.draft_sequence.table, num_tokens):
            victim = next((each for each in self._recent if each not in busy), draft_state)
            self.close_table(victim)
            if victim is draft_state:
                return False
        return True
