from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

import tiny_models
from metal_backend import Emulator, needs_compiler
from octavo.engine.executor.adapt.output_head import select_rows
from octavo.engine.executor.load import probe
from octavo.engine.executor.load.discover import discover_layout
from octavo.engine.executor.load.loader import load_model, materialize
from octavo.engine.executor.model_ops import ModelOps

pytestmark = [pytest.mark.parity, needs_compiler, pytest.mark.timeout(300)]


def probed(folder: Path, name: str, dtype: mx.Dtype) -> tuple[probe.ProbeResult, Emulator]:
    emulator = Emulator()
    loaded = load_model(tiny_models.make_model(folder, name, dtype=dtype), weights="keep")
    layout = discover_layout(loaded.model, name)
    selection = select_rows(loaded.model, vocab_size=layout.vocab_size)
    materialize(loaded.model, ModelOps(), exact=False, fuse=True)
    result = probe.probe(loaded.model, layout, emulator.backend(), selection, architecture=name)
    return result, emulator


@pytest.mark.parametrize("name", ["gemma3_text"])
def test_models_are_paged(tmp_path: Path, name: str) -> None:
    _, emulator = probed(tmp_path, name, mx.bfloat16)
    assert emulator.ran("chunk")
    assert emulator.ran("decode")


def test_models_with_latents_are_paged(tmp_path: Path) -> None:
    """The model is float32, because MLX has no other mixture of experts on this device."""
    result, emulator = probed(tmp_path, "deepseek_v3", mx.float32)
    assert result.latents
    assert emulator.ran("latent")
