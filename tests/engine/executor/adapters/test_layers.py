from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.linear import Linear

import recurrent_models
import tiny_adapters
import tiny_models
from native import require_extension
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import ModelLoadError
from octavo.engine.executor.adapters.layers import Layer, Shape
from octavo.engine.executor.adapters.slots import AdapterSlots, MLXTable
from octavo.engine.executor.load.load import load_paged_runner
from octavo.engine.executor.parallel.shards import Share

ODD = (*tiny_models.LATENT, *tiny_models.CHUNKED, *tiny_models.OWN_ATTENTION, "gemma2", "gpt_oss", "cohere2")
APART = "longcat_flash_ngram"


def config(model: Path, backend: Any) -> EngineConfig:
    return EngineConfig(
        model=str(model), backend=backend, num_pages=40, page_size=8, kv_format="bf16", lora_memory=1 << 24,
        max_loras=2, max_lora_rank=4, max_step_tokens=64,
    )  # fmt: skip


CASES = [("cpu", name) for name in (*ODD, *list(recurrent_models.CONFIGS)[::2]) if name != APART]
CASES += [("reference", name) for name in (*ODD[::4], "kimi_linear")]


@pytest.mark.parametrize(("backend", "architecture"), CASES)
@pytest.mark.few(7)
def test_steps_with_adapters_are_tried_when_a_model_is_loaded(
    architecture: str, backend: str, tmp_path: Path
) -> None:
    require_extension()
    make = tiny_models.make_model if architecture in ODD else recurrent_models.make_folder
    folder = make(tmp_path, architecture, dtype=mx.float32)
    load_paged_runner(config(folder, backend)).close()


def test_a_model_with_layers_of_other_rows_is_refused_with_adapters_alone(tmp_path: Path) -> None:
    require_extension()
    folder = recurrent_models.make_folder(tmp_path, APART)
    with pytest.raises(ModelLoadError, match=r"model.ngram_embeddings.post_projs.0 must get 7 input rows"):
        load_paged_runner(config(folder, "cpu"))
    load_paged_runner(replace(config(folder, "cpu"), lora_memory=None)).close()


@pytest.mark.parametrize("turned", [False, True])
def test_a_layer_of_other_rows_is_refused_by_its_name(
    turned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.models import llama

    plain = llama.MLP.__call__

    def odd(self: Any, x: mx.array) -> mx.array:
        if x.shape[0] < 2 or x.shape[1] != 1:
            return plain(self, x)
        if turned:
            return plain(self, mx.stack([x, x])[:, :, 0])[0][:, None]
        return mx.concatenate([plain(self, x[:1]), plain(self, x[1:])])

    monkeypatch.setattr(llama.MLP, "__call__", odd)
    model = tiny_models.make_model(tmp_path, "llama")
    with pytest.raises(ModelLoadError, match=r"model.layers.0.mlp.\w+ must get 7 input rows"):
        load_paged_runner(config(model, "reference"))


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_the_budget_counts_space_for_every_adapter(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = tiny_models.make_model(tmp_path, architecture, dtype=mx.float32)
    runner = load_paged_runner(config(model, "reference"))
    assert runner.adapters is not None
    tables: list[Any] = list(runner.adapters._tables)
    head = 4 * 3 * 4 * (64 + tiny_models.VOCAB_SIZE)
    assert runner.info.memory.adapters == (1 << 24) + head + sum(t._a.nbytes + t._b.nbytes for t in tables)
    runner.close()
    assert "MLX's own operations compute adapters" in caplog.text
    caplog.clear()
    native = load_paged_runner(config(model, "cpu"))
    assert native.info.memory.adapters == 1 << 24
    assert "MLX's own operations compute adapters" not in caplog.text
    native.close()


def test_parts_of_inputs_have_the_gains_of_the_whole_layer(tmp_path: Path) -> None:
    mx.random.seed(1)
    weight, x, a, b, magnitude = map(mx.random.normal, ((6, 8), (3, 8), (8, 2), (2, 6), (6,)))
    named = {"proj.lora_a": a, "proj.lora_b": b, "proj.m": magnitude}
    parameters = {"fine_tune_type": "dora", "num_layers": 1, "lora_parameters": {"rank": 2, "scale": 3.0}}
    tiny_adapters.save(tmp_path, named, parameters)

    def prepared(weight: mx.array, cut: Share) -> tuple[Layer, AdapterSlots]:
        shape = Shape(1, *weight.shape)
        linear = Linear(shape.inputs, shape.outputs, bias=False)
        linear.weight = weight
        layer = Layer(linear, shape, MLXTable([shape], 2, 4), 0, cut)
        slots = AdapterSlots({"proj": layer}, config(tmp_path, "reference"), ())
        slots.prepare("one", tmp_path, False)
        return layer, slots

    def adapted(layer: Layer, slots: AdapterSlots, x: mx.array, squares: Any) -> mx.array:
        slots.commit(squares)
        slots.hold("one")
        return layer.table.add([layer.module(x)], x, mx.full(3, slots.slot("one"), mx.int32))[0]

    groups = [SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank) for rank in (0, 1)]
    cuts = [Share(True, 1, group) for group in groups]
    parts = [prepared(cut._part(weight), cut) for cut in cuts]
    totals = np.sum([slots.squares() for _, slots in parts], axis=0)
    sums = [adapted(*part, cut._part(x), totals) for part, cut in zip(parts, cuts, strict=True)]
    whole = weight + 3.0 * (a @ b).T
    wanted = magnitude / mx.linalg.norm(whole, axis=1) * (x @ whole.T)
    np.testing.assert_allclose(np.array(sums[0] + sums[1]), np.array(wanted), rtol=1e-5, atol=1e-5)
