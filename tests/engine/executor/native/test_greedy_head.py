from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import tiny_models
from native import require_extension
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor import model_runner as paged
from octavo.engine.executor.base import RunOutput
from octavo.engine.executor.batch import Batch, OutputSelection
from octavo.engine.executor.forward_outputs import Outputs
from octavo.engine.executor.load import load as startup
from octavo.engine.executor.sampling.sampler import NOT_FINITE, SampleState
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata

pytestmark = pytest.mark.parity

_ext = require_extension()

PLAIN, SCORED = SamplingParams(), SamplingParams(logprobs=0)
NUM_STEPS = 6
CHOOSING = {"llama": True, "qwen3": True, "cohere": False, "gemma2": False}  # False: scales or caps logits


def load(folder: Path, **settings: Any) -> paged.PagedRunner:
    config = EngineConfig(
        model=str(folder), backend="cpu", page_size=8, num_pages=16, max_step_tokens=64, **settings
    )
    return startup.load_paged_runner(config)


def step(runner: paged.PagedRunner, tokens: list[list[int]], start: int, params: list[Any]) -> RunOutput:
    counts = [len(own) for own in tokens]
    positions = np.concatenate([np.arange(start, start + n, dtype=np.int32) for n in counts])
    owners = np.repeat(np.arange(len(tokens)), counts)
    table = np.arange(1, 1 + 3 * len(tokens), dtype=np.int32).reshape(-1, 3)
    ends = np.cumsum(counts).astype(np.int32)
    attention = AttentionMetadata(
        positions=positions,
        q_start=np.concatenate([[0], ends]).astype(np.int32),
        kv_len=np.array([start + n for n in counts], np.int32),
        groups=(
            GroupMetadata(
                slots=table[owners, positions // 8] * np.int32(8) + positions % np.int32(8), page_table=table
            ),
        ),
        page_size=8,
    )
    ids = np.concatenate(tokens).astype(np.int32)
    states = [SampleState(p, seed=0, prompt_ids=[], vocab_size=runner.info.vocab_size) for p in params]
    batch = Batch(token_ids=ids, sample_rows=ends - np.int32(1), attention=attention)
    return runner.run(batch, states)


def decode(runner: paged.PagedRunner, params: list[Any]) -> list[list[int | None]]:
    output = step(runner, [[7, 30, 200, 5], [99, 14, 3, 250], [4, 4, 4, 1]], 0, params)
    tokens = [[sample.token for sample in output.samples]]
    for start in range(4, 4 + NUM_STEPS):
        output = step(runner, [[token or 0] for token in tokens[-1]], start, params)
        tokens.append([sample.token for sample in output.samples])
    return tokens


@pytest.mark.parametrize("architecture", CHOOSING)
def test_heads_choose_the_token_of_the_largest_logit(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(tiny_models.make_model(tmp_path / "model", architecture))
    wanted = decode(runner, [SCORED] * 3)
    calls: list[int] = []
    compute = runner._model.forward

    def counted(batch: Batch, wanted: OutputSelection) -> Outputs:
        calls.extend([len(batch.token_ids)] * wanted.greedy)
        return compute(batch, wanted)

    monkeypatch.setattr(runner._model, "forward", counted)
    replay = runner._model.graph_runner
    before = replay.num_replayed if replay is not None else 0
    assert decode(runner, [PLAIN] * 3) == wanted
    assert replay is None or replay.num_replayed > before
    assert len(calls) == (NUM_STEPS + 1) * CHOOSING[architecture]
    assert decode(runner, [PLAIN, SCORED, PLAIN]) == wanted
    assert len(calls) == (NUM_STEPS + 1) * CHOOSING[architecture], "one that asks for more has its logits"
    runner.close()


def test_a_head_that_chooses_wrong_tokens_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = _ext.linear_argmax

    def wrong(*args: Any, **kwargs: Any) -> Any:
        ids, logits = original(*args, **kwargs)
        return mx.maximum(ids - 1, 0), logits

    folder = tiny_models.make_model(tmp_path / "model", "llama")
    monkeypatch.setattr(_ext, "linear_argmax", wrong)
    runner = load(folder)
    assert not runner._fused_argmax
    runner.close()


def test_logits_that_are_not_finite_fail_their_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(tiny_models.make_model(tmp_path / "model", "llama", dtype=mx.float32))
    assert runner._fused_argmax
    good = step(runner, [[7, 30], [99, 14]], 0, [PLAIN] * 2).samples
    compute = runner._model.forward

    def spoilt(*args: Any) -> Outputs:
        outputs = compute(*args)
        assert outputs.choice is not None
        ids, logits = outputs.choice
        return outputs._replace(choice=(ids, mx.where(mx.arange(2) == 1, mx.array(float("nan")), logits)))

    monkeypatch.setattr(runner._model, "forward", spoilt)
    first, bad = step(runner, [[7, 30], [99, 14]], 0, [PLAIN] * 2).samples
    assert first == good[0]
    assert (bad.token, bad.error) == (None, NOT_FINITE)
    head = runner._model._model.lm_head
    weight = np.array(head.weight)
    weight[13] = np.nan
    head.inner.weight = mx.array(weight)
    monkeypatch.setattr(runner._model, "forward", compute)
    runner._model.graph_runner = None
    assert [s.error for s in step(runner, [[7, 30], [99, 14]], 0, [PLAIN] * 2).samples] == [NOT_FINITE] * 2
    runner.close()
