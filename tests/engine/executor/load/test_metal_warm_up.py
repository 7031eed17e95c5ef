from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import recurrent_models
import tiny_heads
import tiny_models
from metal_backend import Emulator, needs_compiler
from metal_engine import metal_engine
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor.load import load
from octavo.engine.executor.load.warm_up import warm_up

pytestmark = [pytest.mark.parity, needs_compiler, pytest.mark.timeout(300)]


def compiled_while_serving(
    folder: Path, *, device: Emulator | None = None, warms_up: bool = True, **settings: Any
) -> set[str]:
    device = Emulator() if device is None else device

    def without_computing(*arguments: Any, **options: Any) -> None:
        device.computes = False
        if warms_up:
            warm_up(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "warm_up", without_computing)
        with metal_engine(folder, device, warms_up=True, **settings) as llm:
            before = set(device.signatures)
            params = [
                SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
                SamplingParams(max_tokens=6, temperature=1, seed=3, n=2, ignore_eos=True),
            ]
            outputs = llm.generate([list(range(150)), [6] * 21], params, progress=False)
            outputs += llm.generate([[1, 2]], params[0], progress=False)
    reasons = {sample.finish_reason for output in outputs for sample in output.outputs}
    assert reasons == {FinishReason.LENGTH}
    return device.signatures - before


def kinds_of(signatures: set[str]) -> set[str]:
    return {name.split("_")[1] for name in signatures}


@pytest.mark.slow
def test_a_head_for_several_tokens_needs_no_kernels_of_its_own(tmp_path: Path) -> None:
    folder = tiny_heads.make_model(tmp_path / "glm4_moe", "glm4_moe", dtype=mx.float32)
    assert compiled_while_serving(folder, kv_format="fp4", residual_pages=0, speculate="mtp") == set()


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        pytest.param("qwen3", {"kv_format": "fp4", "residual_pages": 0}, id="split"),
        pytest.param("qwen3", {"kv_format": "fp4", "max_step_tokens": 32}, id="residual"),
        pytest.param("gemma3_text", {"kv_format": "fp4", "num_pages": 30}, id="windows"),
    ],
)
@pytest.mark.slow
def test_nothing_is_compiled_for_a_request(
    tmp_path: Path, architecture: str, settings: dict[str, Any]
) -> None:
    folder = tiny_models.make_model(tmp_path, architecture, dtype=mx.bfloat16)
    assert compiled_while_serving(folder, **settings) == set()
    kinds = kinds_of(compiled_while_serving(folder, warms_up=False, **settings))
    expected = {"copy", "decode", *(["reduce"] if "residual_pages" in settings else [])}
    assert expected <= kinds, "measuring the loss of a format at load compiles writes and chunks alone"


@pytest.mark.parametrize(
    ("architecture", "kinds"), [("qwen3_5", {"delta", "conv"}), ("nemotron_h", {"ssd", "conv"})]
)
@pytest.mark.few(1)
def test_recurrences_are_compiled_before_requests(tmp_path: Path, architecture: str, kinds: set[str]) -> None:
    folder = recurrent_models.make_folder(tmp_path / "model", architecture, mx.bfloat16)
    settings: dict[str, Any] = {"state_memory": 1 << 20, "residual_pages": 0, "speculate": "ngram"}
    device = Emulator()
    assert compiled_while_serving(folder, device=device, **settings) == set()
    assert kinds <= kinds_of(device.signatures)
