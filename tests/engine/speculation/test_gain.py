"""Gains and costs of drafting, with a fixed time for each number of rows.

The times are close to measurements with Qwen3-0.6B's shape, on AMX and on AVX2 (AMD Zen 1)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from octavo.engine.speculation.draft_times import DraftTimes
from octavo.engine.speculation.drafting import Drafting, Speculation
from octavo.scheduler import Sequence as Served
from octavo_lab.bench.draft_texts import TEXTS

PROMPT, OUTPUT, VOCABULARY = 192, 96, 4000
# (rows, step time divided by the step time of one row).
AMX = [(1, 1.0), (2, 1.12), (4, 1.2), (9, 1.5), (16, 2.0), (72, 6.0)]
AVX2 = [(1, 1.0), (2, 1.6), (4, 2.6), (9, 5.4), (16, 9.0), (72, 36.0)]


class Said:
    def __init__(self, prompt: list[int], said: list[int], drafting: Drafting | None) -> None:
        self.sequence = Served("", [*prompt, said[0]], len(said))
        self.drafting = drafting
        self._text = [*prompt, *said]

    @property
    def tokens_left(self) -> int:
        return len(self._text) - len(self.sequence.tokens)

    def advance(self) -> int:
        assert self.drafting is not None
        tokens, drafts = self.sequence.tokens, self.drafting.drafts
        right = self._text[len(tokens) :]
        held = next((n for n, draft in enumerate(drafts) if draft != right[n]), len(drafts))
        tokens += right[: held + 1]
        return len(drafts) - held


class Gain(NamedTuple):
    ratio: float
    in_vain: float


class Machine:
    def __init__(self, rows: Sequence[tuple[int, float]]) -> None:
        self._rows, self._times = zip(*rows, strict=True)
        self._speculation = Speculation("ngram", max_drafts=8)
        self._learned = DraftTimes()
        self._rng = np.random.default_rng(1)

    def _step_s(self, num_rows: int) -> float:
        return float(np.interp(num_rows, self._rows, self._times))

    def serve(self, text: str, *, batch: int = 1) -> Gain:
        core = SimpleNamespace(info=SimpleNamespace(vocab_size=VOCABULARY))
        samples = []
        for index in range(batch):
            prompt = self._rng.integers(300, VOCABULARY, PROMPT).tolist()
            prompt, said = TEXTS[text].make(self._rng, prompt, OUTPUT, core)  # type: ignore[arg-type]
            (drafting,) = self._speculation.begin(None, [None], num_prompt=PROMPT, owner=index)
            samples.append(Said(prompt, said, drafting))
        for _ in range(10):
            self._learned.observe(batch, 0, self._step_s(batch))
        seconds, in_vain = 0.0, 0
        while unfinished := [sample for sample in samples if sample.tokens_left]:
            ratios = self._learned.ratios(len(unfinished))
            self._speculation.allocate(unfinished, len(unfinished), ratios)
            num_drafts = sum(len(sample.drafting.drafts) for sample in unfinished if sample.drafting)
            step_s = self._step_s(len(unfinished) + num_drafts)
            self._learned.observe(len(unfinished), num_drafts, step_s)
            seconds += step_s
            in_vain += sum(sample.advance() for sample in unfinished)
        return Gain((OUTPUT - 1) * self._step_s(batch) / seconds, 100 * in_vain / batch / OUTPUT)


@pytest.mark.parametrize(("rows", "most_in_vain"), [(AMX, 120), (AVX2, 5)])
@pytest.mark.parametrize("before", [(), ("copy",) * 9])
def test_unpredictable_texts_lose_almost_no_speed(
    rows: list[tuple[int, float]], most_in_vain: float, before: tuple[str, ...]
) -> None:
    machine = Machine(rows)
    for text in before:
        machine.serve(text)
    gains = [machine.serve("adversarial") for _ in range(5)]
    assert min(gain.ratio for gain in gains) > 0.965
    assert float(np.mean([gain.ratio for gain in gains])) > 0.985
    assert max(gain.in_vain for gain in gains) < most_in_vain
    assert machine.serve("free") == Gain(1.0, 0.0)


@pytest.mark.parametrize(
    ("rows", "text", "batch", "least"),
    [
        (AMX, "copy", 1, 3.2),
        (AMX, "copy", 8, 1.3),
        (AMX, "edit", 1, 2.7),
        (AMX, "form", 1, 1.1),
        (AMX, "form", 8, 1.0),
        (AVX2, "copy", 1, 1.3),
        (AVX2, "form", 1, 1.02),
    ],
)
@pytest.mark.parametrize("before", [(), ("adversarial",) * 6])
def test_repetitive_texts_gain_speed(
    rows: list[tuple[int, float]], text: str, batch: int, least: float, before: tuple[str, ...]
) -> None:
    machine = Machine(rows)
    for other in before:
        machine.serve(other)
    gains = [machine.serve(text, batch=batch) for _ in range(3)]
    assert float(np.mean([gain.ratio for gain in gains])) > least


@pytest.mark.parametrize("text", ["copy", "edit", "form", "adversarial"])
def test_eight_sequences_whose_rows_are_dear_lose_hardly_anything(text: str) -> None:
    machine = Machine(AVX2)
    gains = [machine.serve(text, batch=8) for _ in range(2)]
    assert float(np.mean([gain.ratio for gain in gains])) > 0.98
