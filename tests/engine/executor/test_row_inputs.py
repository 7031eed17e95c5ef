from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import tiny_models
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor import model_runner
from octavo.engine.executor.batch import Batch, RowInput, ScoredRows
from octavo.engine.executor.row_inputs import RowInputs
from tiny_runners import PROMPT, i32, load, logprobs_of, make_batch, state

LOGPROBS = SamplingParams(temperature=0, logprobs=1)
PLAIN = SamplingParams(temperature=0)


class Shifted:
    def __init__(self, embedding: Any, inputs: RowInputs) -> None:
        self._embedding = embedding
        self._inputs = inputs

    def __call__(self, ids: mx.array) -> mx.array:
        embedded: mx.array = self._embedding(ids)
        shift = self._inputs.get("shift")
        if shift is None:
            return embedded
        return embedded + (shift[:, None, None] * 0.5).astype(embedded.dtype)


def load_shifted(folder: Path, backend: str) -> model_runner.PagedRunner:
    runner = load(tiny_models.make_model(folder, "llama", tie_word_embeddings=False), backend)
    body = runner._model._model.model
    object.__setattr__(body, "embed_tokens", Shifted(body.embed_tokens, runner._model.row_inputs))
    del body["embed_tokens"]
    return runner


def with_shift(batch: Batch, shift: RowInput) -> Batch:
    return batch._replace(inputs={"shift": shift})


def run(runner: model_runner.PagedRunner, batch: Batch) -> list[float]:
    return logprobs_of(runner.run(batch, [state(LOGPROBS)] * len(batch.sample_rows)))


def test_rows_are_computed_with_their_own_inputs(tmp_path: Path, backend: str) -> None:
    runner = load_shifted(tmp_path, backend)
    plain = make_batch([(PROMPT, 0, [1, 2])], [10])
    (base,) = run(runner, plain)
    (zeros,) = run(runner, with_shift(plain, i32([0] * 11)))
    (ones,) = run(runner, with_shift(plain, i32([1] * 11)))
    (numbers,) = run(runner, with_shift(plain, np.ones(11, np.float32)))
    assert base == zeros
    assert ones == numbers
    assert ones != base
    both = make_batch([(PROMPT, 0, [1, 2]), (PROMPT, 0, [3, 4])], [10, 21])
    mixed = run(runner, with_shift(both, i32([0] * 11 + [1] * 11)))
    assert mixed == pytest.approx([base, ones], abs=1e-3)
    runner.close()


def test_captured_steps_read_the_inputs_of_each_step(tmp_path: Path) -> None:
    runner = load_shifted(tmp_path, "auto")
    runner.run(make_batch([(PROMPT, 0, [1, 2])], []), [])
    step = make_batch([([9], 11, [1, 2])], [0])
    wanted = {shift: run(runner, with_shift(step, np.full(1, shift, np.float32))) for shift in (0, 1, 2)}
    replay = runner._model.graph_runner
    before = 0 if replay is None else replay.num_replayed
    for shift in (0, 1, 2, 1, 0):
        assert run(runner, with_shift(step, i32([shift]))) == wanted[shift]
    assert run(runner, step) == wanted[0]
    assert replay is None or replay.num_replayed == before + 6
    assert len({tuple(each) for each in wanted.values()}) == 3
    runner.close()


def test_slices_have_the_inputs_of_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load_shifted(tmp_path, "auto")
    rows = np.arange(10, dtype=np.int32)
    scored = ScoredRows(rows=rows, targets=i32(PROMPT[1:]), num_top=np.zeros(10, np.int32))
    whole = make_batch([(PROMPT, 0, [1, 2])], [10])._replace(scored=scored)
    whole = with_shift(whole, i32([0, 1] * 5 + [0]))
    once = runner.run(whole, [state(LOGPROBS)])
    monkeypatch.setattr(model_runner, "LOGIT_BYTES", 3 * 4 * runner.info.vocab_size)
    sliced = runner.run(whole, [state(LOGPROBS)])
    assert [score.logprob for score in sliced.scores] == pytest.approx(
        [score.logprob for score in once.scores], abs=1e-3
    )
    assert logprobs_of(sliced) == pytest.approx(logprobs_of(once), abs=1e-3)
    runner.close()
