"""Models with recurrent layers on Metal: attention by our kernels, states by mlx-lm's operations."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

import recurrent_models
from metal_backend import Emulator, needs_compiler
from metal_engine import metal_engine
from metal_in_place import WritingDevice
from octavo.engine import SamplingParams
from octavo.engine.executor.adapt.output_head import select_rows
from octavo.engine.executor.load import probe
from octavo.engine.executor.load.discover import discover_layout
from octavo.engine.executor.load.loader import load_model, materialize
from octavo.engine.executor.model_ops import model_ops

pytestmark = [pytest.mark.parity, needs_compiler, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_attention_runs_on_kernels_and_recurrences_on_operations(name: str, tmp_path: Path) -> None:
    emulator = Emulator()
    backend = emulator.backend()
    ops = model_ops(backend)
    assert ops.recurrences is None
    folder = recurrent_models.make_folder(tmp_path / name, name, mx.bfloat16)
    loaded = load_model(folder, weights="keep", ops=ops)
    layout = discover_layout(loaded.model, name)
    selection = select_rows(loaded.model, vocab_size=layout.vocab_size)
    materialize(loaded.model, ops, exact=False, fuse=True)
    result = probe.probe(loaded.model, layout, backend, selection, architecture=name, kernels=ops.recurrences)
    assert result.tier == "paged", probe.describe(result)
    assert emulator.ran("chunk")
    assert emulator.ran("decode")
    assert result.recurrent is not None
    assert result.recurrent.tier == "ragged"
    assert all(native == 0 < plain for native, plain in result.recurrent.count_cut_points().values())


def test_a_prompt_goes_on_from_a_snapshot(tmp_path: Path) -> None:
    """The same log probabilities cold and from a state; a state that was lost moves the first by 0.03."""
    folder = recurrent_models.make_folder(tmp_path / "model", "qwen3_5", mx.bfloat16)
    prompt = [*range(10, 50)]
    longer = [*prompt, *range(60, 90)]
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)
    answers = []
    for before in ([], [prompt]):
        with metal_engine(folder, WritingDevice(), state_memory=1 << 20) as llm:
            for tokens in before:
                llm.generate([tokens], SamplingParams(max_tokens=1, ignore_eos=True))
            (output,) = llm.generate([longer], params)
            assert output.cached_tokens == (32 if before else 0)
            answers.append([entry.logprob for entry in output.outputs[0].logprobs or ()])
    assert len(answers[0]) == 6
    assert answers[1] == pytest.approx(answers[0], abs=0.01)
