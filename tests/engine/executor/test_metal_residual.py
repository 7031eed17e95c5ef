from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import tiny_models
from metal_backend import Emulator, needs_compiler
from metal_engine import metal_engine
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.frontend.llm import LLM

pytestmark = [pytest.mark.parity, pytest.mark.slow, needs_compiler, pytest.mark.timeout(300)]


def answers(llm: LLM) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=0, ignore_eos=True)
    found = []
    for prompt in ([7] * 50 + [3] * 20, [6] * 9):
        ((sample,),) = (output.outputs for output in llm.generate([prompt], params, progress=False))
        assert sample.logprobs is not None
        found.append((list(sample.token_ids), [token.logprob for token in sample.logprobs]))
    return found


def furthest(some: list[tuple[list[int], list[float]]], others: list[tuple[list[int], list[float]]]) -> float:
    return max(
        abs(a - b)
        for (_, mine), (_, theirs) in zip(some, others, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def test_answers_are_those_of_the_reference(tmp_path: Path) -> None:
    folder = tiny_models.make_model(tmp_path, "gemma3_text", dtype=mx.float32, sliding_window=40)
    settings: dict[str, Any] = {"kv_format": "fp4", "page_size": 16, "num_pages": 40, "max_running": 6}
    settings["max_step_tokens"] = 48
    with LLM(EngineConfig(model=str(folder), backend="reference", **settings)) as llm:
        want = answers(llm)
    with LLM(EngineConfig(model=str(folder), backend="reference", **settings, residual_pages=0)) as llm:
        quantized = answers(llm)
    device = Emulator()
    with metal_engine(folder, device, **settings) as llm:
        got = answers(llm)
    assert any("_w0_k0_b" in name for name, _ in device.results), "a kernel that is told where windows begin"
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
    assert furthest(got, want) < 0.05
    assert furthest(quantized, want) > 0.1
