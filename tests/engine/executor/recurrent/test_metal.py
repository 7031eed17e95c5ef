from __future__ import annotations

from collections import Counter
from pathlib import Path

import mlx.core as mx
import pytest

import recurrent_models
from metal_backend import Emulator, needs_compiler
from metal_engine import metal_engine
from octavo.engine import SamplingParams
from octavo.engine.executor.adapt.output_head import select_rows
from octavo.engine.executor.load import probe
from octavo.engine.executor.load.discover import discover_layout
from octavo.engine.executor.load.loader import load_model, materialize
from octavo.engine.executor.load.prepare import model_ops
from octavo.engine.executor.load.probe import ProbeResult
from octavo.engine.executor.recurrent.recurrences import recurrences_of
from octavo.engine.executor.recurrent.state_pool import StatePool
from octavo.kernels.metal.backend import MetalBackend
from octavo.kernels.metal.recurrent import MetalRecurrences, SegmentArrays
from octavo.kernels.state_segments import StateSegments

pytestmark = [pytest.mark.parity, needs_compiler, pytest.mark.timeout(300)]


def probed(name: str, backend: MetalBackend, folder: Path, dtype: mx.Dtype = mx.bfloat16) -> ProbeResult:
    ops = model_ops(backend)
    recurrent_models.make_folder(folder, name, dtype)
    loaded = load_model(folder, weights="keep", ops=ops)
    layout = discover_layout(loaded.model, name)
    selection = select_rows(loaded.model, vocab_size=layout.vocab_size)
    materialize(loaded.model, ops, exact=False, fuse=True)
    return probe.probe(
        loaded.model, layout, backend, selection, architecture=name, recurrences=recurrences_of(backend)
    )


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_attention_runs_on_kernels_and_recurrences_on_operations(name: str, tmp_path: Path) -> None:
    emulator = Emulator(forgets=("delta",))
    backend = emulator.backend()
    assert recurrences_of(backend) is None
    result = probed(name, backend, tmp_path / name)
    assert emulator.ran("chunk")
    assert emulator.ran("decode")
    assert result.recurrent is not None
    assert all(native == 0 < plain for native, plain in result.recurrent.count_cut_points().values())


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("kimi_linear", {"conv", "delta"}),
        ("nemotron_h", {"conv", "ssd"}),
        pytest.param("qwen3_next", {"conv", "delta"}, marks=pytest.mark.slow),
        pytest.param("qwen3_5", {"conv", "delta"}, marks=pytest.mark.slow),
        pytest.param("granitemoehybrid", {"conv", "ssd"}, marks=pytest.mark.slow),
        pytest.param("falcon_h1", {"conv", "ssd"}, marks=pytest.mark.slow),
        pytest.param("lfm2", {"conv"}, marks=pytest.mark.slow),
    ],
)
def test_recurrences_run_on_kernels(name: str, kinds: set[str], tmp_path: Path) -> None:
    """The model is float32, because MLX has no 16-bit experts on a CPU."""
    device = Emulator()
    result = probed(name, device.backend(), tmp_path / name, mx.float32)
    assert result.error < 1e-3
    assert result.recurrent is not None
    counts = result.recurrent.count_cut_points()
    assert all(plain == 0 < native for native, plain in counts.values())
    assert kinds <= set(device.launches)


def test_one_launch_for_each_recurrence_of_a_step(tmp_path: Path) -> None:
    folder = recurrent_models.make_folder(tmp_path / "model", "qwen3_5", mx.bfloat16)
    device = Emulator()
    steps: list[Counter[str]] = []
    commit = StatePool.commit

    def counting(pool: StatePool) -> None:
        steps.append(device.launches - sum(steps, Counter()))
        commit(pool)

    with pytest.MonkeyPatch.context() as patch, metal_engine(folder, device, state_memory=1 << 20) as llm:
        steps.append(device.launches)
        patch.setattr(StatePool, "commit", counting)
        prompts = [[1, 2, 3], list(range(50)), [6] * 21]
        llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True), progress=False)
    assert len(steps) > 4
    for step in steps[1:]:
        assert (step["delta"], step["conv"]) == (3, 3)


@pytest.mark.usefixtures("every_draft_is_computed")
@pytest.mark.slow
def test_drafts_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recurrent_models.make_folder(tmp_path / "model", "qwen3_5", mx.bfloat16)
    prompt = [1, 2, 3] * 8
    words = dict.fromkeys((1, 2, 3), 100.0)
    num_drafted, arrays = Counter[str](), MetalRecurrences.arrays
    answers: dict[str, list[int]] = {}
    for drafter in ("off", "ngram"):

        def counting(kernels: MetalRecurrences, step: StateSegments, drafter: str = drafter) -> SegmentArrays:
            drafts = 1 < step.num_rows < len(prompt) and len(step.checkpoints) >= step.num_rows - 1
            num_drafted[drafter] += drafts
            return arrays(kernels, step)

        monkeypatch.setattr(MetalRecurrences, "arrays", counting)
        params = SamplingParams(max_tokens=16, seed=3, temperature=30.0, top_k=3, logit_bias=words)
        with metal_engine(folder, Emulator(), state_memory=1 << 20, speculate=drafter) as llm:
            (output,) = llm.generate([prompt], params, progress=False)
        answers[drafter] = output.outputs[0].token_ids
    assert set(answers["off"]) == {1, 2, 3}
    assert answers["ngram"] == answers["off"]
    assert num_drafted["off"] == 0 < num_drafted["ngram"]


def test_a_prompt_continues_from_a_snapshot(tmp_path: Path) -> None:
    folder = recurrent_models.make_folder(tmp_path / "model", "qwen3_5", mx.bfloat16)
    prompt = [*range(10, 50)]
    longer = [*prompt, *range(60, 90)]
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)
    answers = []
    for before in ([], [prompt]):
        with metal_engine(folder, Emulator(), state_memory=1 << 20) as llm:
            for tokens in before:
                llm.generate([tokens], SamplingParams(max_tokens=1, ignore_eos=True))
            (output,) = llm.generate([longer], params)
            assert output.cached_tokens == (32 if before else 0)
            answers.append([entry.logprob for entry in output.outputs[0].logprobs or ()])
    assert len(answers[0]) == 6
    assert answers[1] == pytest.approx(answers[0], abs=0.01)
