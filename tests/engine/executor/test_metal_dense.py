"""An engine whose long prompts go through MLX's own attention, on an emulated Metal device."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import tiny_models
from metal_backend import needs_compiler
from metal_engine import metal_engine
from metal_in_place import WritingDevice
from octavo.engine.api.sampling_params import SamplingParams

pytestmark = [pytest.mark.parity, needs_compiler, pytest.mark.timeout(300)]


def serve(folder: Path, **settings: Any) -> tuple[list[Any], int]:
    """Tokens of two prompts, and how often the dense kernel was launched for them."""
    device = WritingDevice()
    with metal_engine(folder, device, **settings) as llm:
        before = device.launches["dense"]
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        outputs = llm.generate([list(range(70)), [6] * 9], params, progress=False)
        return [output.outputs[0].token_ids for output in outputs], device.launches["dense"] - before


def test_tokens_are_those_of_the_kernel(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = tiny_models.make_model(tmp_path, "qwen3", dtype=mx.float32, head_dim=64)
    want, launches = serve(folder, kv_format="fp4", residual_pages=0)
    assert launches == 0
    got, launches = serve(folder, kv_format="fp4", residual_pages=0, metal_dense_prompts=16)
    assert got == want
    assert launches > 0
    assert "metal_dense_prompts: prompts with 16 rows or more in a step go through MLX's" in caplog.text


def test_beside_a_residual_window_nothing_is_dense_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = tiny_models.make_model(tmp_path, "qwen3", dtype=mx.float32, head_dim=64)
    _, launches = serve(folder, kv_format="fp4", metal_dense_prompts=16)
    assert launches == 0
    assert "metal_dense_prompts 16 changes nothing beside a residual window" in caplog.text
