"""Page tables of drafters that have their own pages."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.block_manager import BlockManager, PageTable
from octavo.kernels.metadata import Ints
from octavo.scheduler import SchedulerOutput
from octavo.scheduler import Sequence as Served

from ..executor.sampling.sampler import SampleState

States = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class Guesses:
    """A drafter's pages of one sample, and the tokens that it was fed."""

    sequence: Served
    served: Served | None = None  # holds a table of the drafter's pages
    failed: bool = False  # whether the drafter cannot compute this text
    fed: list[int] = field(default_factory=list)  # tokens fed to the drafter, followed by its drafts


@dataclass(frozen=True, slots=True)
class Ask:
    """Request for ``count`` drafts after ``tokens``, sampled with ``state`` as the tokens will be."""

    guesses: Guesses
    tokens: Sequence[int]
    state: SampleState
    count: int


class Average:
    """Exponential mean of times: the latest weighs a tenth; 0 before the first."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, seconds: float) -> None:
        self.value += (0.1 if self.value else 1.0) * (seconds - self.value)


class BatchDrafter(Protocol):
    """A drafter for many samples at once. Called only on the engine's thread."""

    @property
    def round_s(self) -> Average:
        """Seconds of a forward for one more draft."""
        ...

    @property
    def blocks(self) -> BlockManager:
        """Block manager of the drafter's pages."""
        ...

    def rows_of(self, step: SchedulerOutput) -> Ints | None:
        """Return the ascending rows of a step whose hidden states it reads; None for no rows."""
        ...

    def record(self, states: States) -> None:
        """Take the hidden states [P, D] of those rows."""
        ...

    def begin(self, sequence: Served) -> Guesses:
        """Return the state of a new sample, which ends with ``close``."""
        ...

    def guess(self, asks: Iterable[Ask]) -> list[tuple[int, ...]]:
        """Return as many drafts as requested for each sample; fewer if it must read first, has no pages, or
        fails."""
        ...

    def close(self, guesses: Guesses) -> None:
        """Release the pages of a sample; published ones stay cached."""
        ...

    def shut_down(self) -> None:
        """Release all pages and the model."""
        ...


class DraftTables:
    """Tables in the order of their last request. If pages are short, the table requested longest ago is
    closed."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._asked: dict[Guesses, None] = {}  # samples with pages, the last requested at the end

    def open(self, guesses: Guesses, tokens: Sequence[int]) -> PageTable:
        """Return the table of a sample, with the cached pages of ``tokens`` if it is new."""
        if guesses.served is None:
            salt = guesses.sequence.salt
            guesses.served = Served("draft", list(tokens), 1, salt=salt)
            guesses.served.table = self._blocks.open(guesses.served.tokens, salt=salt)
        self._asked.pop(guesses, None)
        self._asked[guesses] = None
        assert guesses.served.table is not None
        return guesses.served.table

    def reserve(self, guesses: Guesses, num_tokens: int, busy: Container[Guesses]) -> bool:
        """Reserve pages for ``num_tokens`` positions, if necessary by closing tables that are not ``busy``;
        on failure close this one."""
        assert guesses.served is not None
        assert guesses.served.table is not None
        while not self._blocks.reserve(guesses.served.table, num_tokens):
            victim = next((each for each in self._asked if each not in busy), guesses)
            self.close(victim)
            if victim is guesses:
                return False
        return True

    def close(self, guesses: Guesses) -> None:
        self._asked.pop(guesses, None)
        if guesses.served is not None and guesses.served.table is not None:
            self._blocks.close(guesses.served.table)
        guesses.served = None

    def close_all(self) -> None:
        for guesses in list(self._asked):
            self.close(guesses)
