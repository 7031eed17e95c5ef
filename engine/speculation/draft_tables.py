"""Page tables of samples that something else than their model guesses for."""

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
    """What a drafter with pages knows of one sample, whose tokens are ``sequence``'s: its pages, and what was
    fed to it."""

    sequence: Served
    served: Served | None = None  # with a table of the drafter's pages
    failed: bool = False  # the drafter cannot compute this text
    fed: list[int] = field(default_factory=list)  # the tokens that were guessed for, and guesses behind them


@dataclass(frozen=True, slots=True)
class Ask:
    """``count`` guesses at what follows ``tokens``, drawn as ``state`` will draw the tokens."""

    guesses: Guesses
    tokens: Sequence[int]
    state: SampleState
    count: int


class Average:
    """A mean of times that forgets: the latest weighs a tenth; 0 before the first."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, seconds: float) -> None:
        self.value += (0.1 if self.value else 1.0) * (seconds - self.value)


class BatchDrafter(Protocol):
    """Guesses for many samples side by side. Every call comes from the engine's thread."""

    @property
    def round_s(self) -> Average:
        """Seconds of a forward for one more guess."""
        ...

    @property
    def blocks(self) -> BlockManager:
        """Of its pages."""
        ...

    def rows_of(self, step: SchedulerOutput) -> Ints | None:
        """Return the rows of a step, ascending, whose hidden states it reads; None for no rows."""
        ...

    def record(self, states: States) -> None:
        """Take the hidden states [P, D] of those rows."""
        ...

    def begin(self, sequence: Served) -> Guesses:
        """For a new sample. It ends with ``close``."""
        ...

    def guess(self, asks: Iterable[Ask]) -> list[tuple[int, ...]]:
        """For each, as many guesses as asked for; fewer where it must read first, has no pages, or fails."""
        ...

    def close(self, guesses: Guesses) -> None:
        """Give the pages of a sample back; what it published may be found again."""
        ...

    def shut_down(self) -> None:
        """Give all pages back, and what it computes with."""
        ...


class DraftTables:
    """Tables in the order in which their samples asked: where pages are short, those of who asked longest ago
    are taken."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._asked: dict[Guesses, None] = {}  # those with pages, who asked last at the end

    def open(self, guesses: Guesses, tokens: Sequence[int]) -> PageTable:
        """The table of one who asks, with what is cached of ``tokens`` if it is new."""
        if guesses.served is None:
            salt = guesses.sequence.salt
            guesses.served = Served("draft", list(tokens), 1, salt=salt)
            guesses.served.table = self._blocks.open(guesses.served.tokens, salt=salt)
        self._asked.pop(guesses, None)
        self._asked[guesses] = None
        assert guesses.served.table is not None
        return guesses.served.table

    def reserve(self, guesses: Guesses, num_tokens: int, busy: Container[Guesses]) -> bool:
        """Room for so many positions, if need be in the place of who is not ``busy``; else it is closed."""
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
