from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.block_manager import BlockManager, PageTable
from octavo.kernels.metadata import Ints
from octavo.scheduler import SchedulerOutput
from octavo.scheduler import Sequence as Served

from ..executor.sampling.sampler import SampleState
from .drafter import ModelDrafter
from .drafting import Drafting

States = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class Guesses:
    sequence: Served
    served: Served | None = None
    failed: bool = False
    fed: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ask:
    """Request for ``count`` drafts after ``tokens``."""

    guesses: Guesses
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
        self._asked: dict[Guesses, None] = {}

    def rows_of(self, step: SchedulerOutput) -> Ints | None:  # noqa: ARG002
        """Return the ascending rows of a step whose hidden states the drafter needs, if any."""
        return None

    def record(self, states: States) -> None:
        """Record the hidden states [P, D] of the rows that ``rows_of`` returned."""
        raise AssertionError(f"{len(states)} hidden states for a drafter that reads none")

    def begin(self, sequence: Served) -> Guesses:
        return Guesses(sequence)

    @abstractmethod
    def guess(self, asks: Iterable[Ask]) -> list[tuple[int, ...]]:
        """Return drafts for each sample; fewer if pages are short."""

    def close(self, guesses: Guesses) -> None:
        self.close_table(guesses)

    def close_table(self, guesses: Guesses) -> None:
        self._asked.pop(guesses, None)
        if guesses.served is not None and guesses.served.table is not None:
            self.blocks.close(guesses.served.table)
        guesses.served = None

    def shut_down(self) -> None:
        for guesses in list(self._asked):
            self.close(guesses)

    def open_table(self, guesses: Guesses, tokens: Sequence[int]) -> PageTable:
        if guesses.served is None:
            salt = guesses.sequence.salt
            guesses.served = Served("draft", list(tokens), 1, salt=salt)
            guesses.served.table = self.blocks.open(guesses.served.tokens, salt=salt)
        self._asked.pop(guesses, None)
        self._asked[guesses] = None
        assert guesses.served.table is not None
        return guesses.served.table

    def reserve(self, guesses: Guesses, num_tokens: int, busy: Container[Guesses]) -> bool:
        assert guesses.served is not None
        assert guesses.served.table is not None
        while not self.blocks.reserve(guesses.served.table, num_tokens):
            victim = next((each for each in self._asked if each not in busy), guesses)
            self.close_table(victim)
            if victim is guesses:
                return False
        return True


class Guessed(Protocol):
    drafting: Drafting | None

    @property
    def sequence(self) -> Served: ...

    @property
    def state(self) -> SampleState: ...

    @property
    def room(self) -> int: ...


class ModelGuesses:
    def __init__(self, model: BatchDrafter | None, clock: Callable[[], float]) -> None:
        self._model = model
        self._clock = clock
        self._guesses: dict[Guessed, Guesses] = {}
        self._guessing_s = 0.0
        self._step_s = Average()

    def __len__(self) -> int:
        return len(self._guesses)

    def begin(self, sample: Guessed) -> None:
        if sample.drafting is not None and sample.drafting.by_model is not None:
            assert self._model is not None
            self._guesses[sample] = self._model.begin(sample.sequence)

    def end(self, sample: Guessed) -> None:
        if self._model is not None and (guesses := self._guesses.pop(sample, None)) is not None:
            self._model.close(guesses)

    def guess(self, going_on: Sequence[Guessed], draft_cost: Callable[[int], float]) -> None:
        if self._model is None:
            return
        began = self._clock()
        asks: list[Ask] = []
        drafters: list[ModelDrafter] = []
        others = len(going_on) - 1
        for sample in going_on:
            if sample.drafting is None or (drafter := sample.drafting.by_model) is None:
                continue
            if not asks:
                cost = draft_cost(len(going_on))
                if step_s := self._step_s.value:
                    cost += self._model.round_s.value / step_s / len(going_on)
            tokens = sample.sequence.tokens
            count = sample.drafting.num_guesses(tokens, sample.room, cost=cost, others=others)
            asks.append(Ask(self._guesses[sample], tokens, sample.state, count))
            drafters.append(drafter)
        for drafter, guesses in zip(drafters, self._model.guess(asks), strict=True):
            drafter.guesses = guesses
        self._guessing_s = self._clock() - began

    def time_without(self, seconds: float) -> float:
        seconds, self._guessing_s = seconds - self._guessing_s, 0.0
        self._step_s.add(seconds)
        return seconds
