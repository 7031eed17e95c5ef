"""Drafts of a draft model, or of the model's MTP head, for many samples at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.scheduler import Sequence as Served

from ..executor.sampling.sampler import SampleState
from .draft_tables import Ask, Average, BatchDrafter, Guesses
from .drafter import ModelDrafter
from .drafting import Drafting


class Guessed(Protocol):
    """A sample for which a model may draft."""

    drafting: Drafting | None

    @property
    def sequence(self) -> Served: ...

    @property
    def state(self) -> SampleState: ...

    @property
    def room(self) -> int:
        """Number of tokens that may follow."""
        ...


class ModelGuesses:
    """Requests from ``model`` as many drafts as are worth their time; does nothing without a model."""

    def __init__(self, model: BatchDrafter | None, clock: Callable[[], float]) -> None:
        self._model = model
        self._clock = clock
        self._guesses: dict[Guessed, Guesses] = {}
        self._guessing_s = 0.0  # seconds that the drafter took in this step
        self._step_s = Average()  # seconds of a step without the drafter

    def __len__(self) -> int:
        return len(self._guesses)

    def begin(self, sample: Guessed) -> None:
        """Register a new sample; ``end`` is called at its end."""
        if sample.drafting is not None and sample.drafting.by_model is not None:
            assert self._model is not None
            self._guesses[sample] = self._model.begin(sample.sequence)

    def end(self, sample: Guessed) -> None:
        if self._model is not None and (guesses := self._guesses.pop(sample, None)) is not None:
            self._model.close(guesses)

    def guess(self, going_on: Sequence[Guessed], draft_cost: Callable[[int], float]) -> None:
        """Give the drafters of these samples, all of which got a token from the last step, their drafts.
        ``draft_cost``: cost of a draft with this many sequences, see ``DraftTimes.cost``."""
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
        """Return the duration of a step without drafting; called once per step."""
        seconds, self._guessing_s = seconds - self._guessing_s, 0.0
        self._step_s.add(seconds)
        return seconds
