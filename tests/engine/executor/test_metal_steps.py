from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import tiny_models
from attention_cases import build_metadata
from late_device import LateDevice
from metal_backend import Emulator, needs_compiler
from metal_engine import metal_engine
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor.adapt.output_head import select_rows
from octavo.engine.executor.batch import Batch, OutputSelection
from octavo.engine.executor.device_step import DeviceStep
from octavo.engine.executor.load.discover import discover_layout
from octavo.engine.executor.load.loader import load_model, materialize
from octavo.engine.executor.model_ops import ModelOps
from octavo.engine.executor.paged_model import PagedModel
from octavo.engine.frontend.llm import LLM
from octavo.kernels.groups import group_layers
from octavo.kernels.interface import AttendOptions, LayerSpec, PoolSpec
from octavo.kernels.kv_cache import create_kv_cache
from octavo.kernels.metal.backend import MetalBackend
from octavo.kernels.metal.launch import KernelLibrary
from octavo.kernels.metal.pool import MetalPool

pytestmark = [pytest.mark.parity, pytest.mark.timeout(300)]

MAX_LENGTH = 400
NUM_PAGES = 31


def on_gpu(**parts: Any) -> Callable[..., Sequence[mx.array]]:
    kernel: Any = mx.fast.metal_kernel(**parts)
    return lambda **arguments: kernel(stream=mx.gpu, **arguments)


def paged_model(folder: Path, architecture: str, backend: MetalBackend) -> PagedModel:
    loaded = load_model(folder, weights="keep")
    layout = discover_layout(loaded.model, architecture)
    selection = select_rows(loaded.model, vocab_size=layout.vocab_size)
    materialize(loaded.model, ModelOps(), exact=False, fuse=True)
    groups = group_layers(layout.layers, MAX_LENGTH)
    spec = PoolSpec(layers=layout.layers, num_pages=0, page_size=16, k_format="fp4", v_format="fp4")
    cache = create_kv_cache(backend, spec, groups, [NUM_PAGES] * len(groups))
    return PagedModel(loaded.model, layout, cache, selection=selection)


@pytest.fixture(autouse=True)
def mlx_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(ImportError):
        from octavo.engine.executor.native import activations

        monkeypatch.setattr(activations, "on_cpu", lambda: False)


def primitives_of(model: PagedModel, lengths: Sequence[int]) -> list[dict[str, Any]]:
    tables = [np.arange(length // 16 + 1, dtype=np.int32) for length in lengths]
    metadata = build_metadata([(length, 1) for length in lengths], tables, 16)
    groups = len(model.kv_cache.storages)
    metadata = type(metadata)(
        positions=metadata.positions,
        q_start=metadata.q_start,
        kv_len=metadata.kv_len,
        groups=metadata.groups * groups,
        page_size=16,
    )
    rows = np.arange(len(lengths), dtype=np.int32)
    found: list[dict[str, Any]] = []

    def step(token_ids: mx.array) -> list[mx.array]:
        (logits,) = model.forward(Batch(rows, rows, metadata), OutputSelection(rows), token_ids).arrays
        return [logits, *model.kv_cache.flags()]

    mx.export_function(found.append, step, mx.array(rows))
    for storage in model.kv_cache.storages:
        assert isinstance(storage, MetalPool)
        storage._last = [mx.array(np.zeros(8, bool))] * len(storage.spec.layers)
    return [entry for entry in found if entry["type"] == "primitive"]


@pytest.mark.parametrize(
    ("architecture", "lengths", "per_layer"),
    [("qwen3", (5, 60), 2), ("qwen3", (5, 300), 3), ("gemma3_text", (5, 90), 2), ("gpt_oss", (30, 3), 2)],
)
def test_a_layer_of_a_decode_step_takes_two_launches_or_three_and_moves_no_pool(
    tmp_path: Path, architecture: str, lengths: tuple[int, ...], per_layer: int
) -> None:
    backend = MetalBackend(KernelLibrary(on_gpu))
    folder = tiny_models.make_model(tmp_path, architecture, dtype=mx.bfloat16)
    model = paged_model(folder, architecture, backend)
    layers = sum(len(storage.spec.layers) for storage in model.kv_cache.storages)
    steps = [primitives_of(model, lengths) for _ in range(2)]
    for step in steps:
        launches = Counter(
            entry["arguments"][0].split("_octavo_")[1].split("_")[0]
            for entry in step
            if entry["name"] == "CustomKernel"
        )
        attention = {"decode": layers} if per_layer == 2 else {"decode": layers, "reduce": layers}
        assert launches == {"write": layers} | attention
        sizes = {
            storage.spec.num_pages * 16 * layer.num_kv_heads
            for storage in model.kv_cache.storages
            for layer in storage.spec.layers
        }
        moved = [
            (entry["name"], shape)
            for entry in step
            for _, shape, _ in entry["outputs"]
            if shape and shape[0] in sizes
        ]
        assert not moved, "arrays of the pool are computed anew"


@pytest.mark.parametrize(
    ("sequences", "launches"),
    [
        (((5, 1), (60, 1)), 2),
        (((5, 1), (300, 1)), 3),
        (((5, 40),), 2),
        (((5, 3), (60, 1), (0, 7)), 3),
        (((300, 1), (5, 3), (60, 1)), 4),
    ],
    ids=("decode", "split", "chunk", "mixed", "mixed and split"),
)
def test_mlx_computes_nothing_for_pages_itself(sequences: tuple[tuple[int, int], ...], launches: int) -> None:
    layer = LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64)
    spec = PoolSpec(layers=(layer,), num_pages=NUM_PAGES, page_size=16, k_format="fp4", v_format="fp4")
    pool = MetalPool(spec, KernelLibrary(on_gpu))
    tables = [np.arange((old + new) // 16 + 1, dtype=np.int32) for old, new in sequences]
    options = AttendOptions(scale=0.1, sinks=mx.ones(4, mx.bfloat16))
    found: list[dict[str, Any]] = []
    rows = [mx.zeros((sum(new for _, new in sequences), heads, 64), mx.bfloat16) for heads in (2, 2, 4)]

    def step(keys: mx.array, values: mx.array, queries: mx.array) -> list[mx.array]:
        pool.begin_step(build_metadata(sequences, tables, 16))
        pool.write(0, keys, values)
        return [pool.attend(0, queries, options), *pool.pending()]

    mx.export_function(found.append, step, *rows)
    names = [entry["name"] for entry in found if entry["type"] == "primitive"]
    assert names == ["CustomKernel"] * launches


def answers(llm: LLM) -> list[Any]:
    params = [
        SamplingParams(max_tokens=7, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=5, temperature=1, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=0, ignore_eos=True),
    ]
    prompts = [[1, 2, 3], list(range(40)), [6] * 21]
    outputs = llm.generate(prompts, params, progress=False)
    return [[(c.token_ids, c.text) for c in output.outputs] for output in outputs]


@needs_compiler
@pytest.mark.parametrize("architecture", [pytest.param("qwen3", marks=pytest.mark.slow), "gemma3_text"])
def test_steps_overlap_by_default_and_change_no_token(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_models.make_model(tmp_path, architecture)
    followed: list[int] = []
    take = DeviceStep.take

    def taking(self: DeviceStep, sources: Any) -> mx.array:
        followed.append(len(sources))
        return take(self, sources)

    monkeypatch.setattr(DeviceStep, "take", taking)
    with metal_engine(folder, Emulator(), async_steps=False) as llm:
        expected = answers(llm)
    assert not followed
    for device in (Emulator(), LateDevice()):
        with metal_engine(folder, device, warms_up=architecture == "qwen3") as llm:
            assert answers(llm) == expected
        assert len(followed) > 3
        followed.clear()
    assert isinstance(device, LateDevice)
    assert device.most_waiting > 2 * 4, "no step was in flight while the next one was launched"
