"""The host's work for a decode step, counted in calls of Python functions.

Counts are exact on any machine, unlike times."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import octavo
import tiny_models
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor.model_runner import PagedRunner
from octavo.engine.frontend.llm import LLM
from octavo.kernels.interface import AttendOptions, LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata
from octavo.kernels.metal.in_place import InPlacePool
from octavo.kernels.metal.launch import KernelLibrary

pytestmark = pytest.mark.parity

HERE = Path(octavo.__file__).resolve().parents[2]


class Calls:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def begin(self) -> None:
        sys.setprofile(self._profile)

    def end(self) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<"):
            return
        path = Path(code.co_filename).resolve()
        if path.is_relative_to(HERE) and path.relative_to(HERE).parts[0] not in (".venv", "tests"):
            self.counts[f"{path.relative_to(HERE)}:{code.co_name}"] += 1


def calls_between_submits(folder: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    submit = PagedRunner.submit
    steps: list[tuple[int, Calls]] = []

    def submitting(self: PagedRunner, batch: Any, *rest: Any) -> Any:
        if steps:
            steps[-1][1].end()
        pending = submit(self, batch, *rest)
        steps.append((len(batch.token_ids), Calls()))
        steps[-1][1].begin()
        return pending

    with monkeypatch.context() as patch:
        patch.setattr(PagedRunner, "submit", submitting)
        config = EngineConfig(
            model=str(folder),
            backend="reference",
            async_steps=True,
            page_size=32,
            num_pages=60,
            max_running=8,
        )
        with LLM(config) as llm:
            params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
            llm.generate([[1, 2, 3 + i] for i in range(rows)], [params] * rows, progress=False)
    decodes = [calls.counts for tokens, calls in steps[:-1] if tokens == rows]
    assert len(decodes) > 15
    return decodes[len(decodes) // 2]


def test_calls_between_two_submits_grow_by_a_few_for_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_models.make_model(tmp_path, "qwen3")
    one, two, eight = (calls_between_submits(folder, rows, monkeypatch) for rows in (1, 2, 8))
    assert one.total() <= 140
    assert (eight.total() - two.total()) / 6 <= 30, (eight - two).most_common()
    of_arrays = ("kernels/", "engine/executor/device_step.py", "engine/executor/model_runner.py")
    repeated = {name for name in eight if name.startswith(of_arrays) and eight[name] != two[name]}
    assert not repeated, "arrays are handled once for all rows"


def decode_step(rows: int) -> AttentionMetadata:
    positions = np.arange(20, 20 + rows, dtype=np.int32)
    return AttentionMetadata(
        positions=positions,
        q_start=np.arange(rows + 1, dtype=np.int32),
        kv_len=positions + np.int32(1),
        groups=(
            GroupMetadata(
                slots=positions + 64 * np.arange(rows, dtype=np.int32),
                page_table=np.arange(4 * rows, dtype=np.int32).reshape(rows, 4),
            ),
        ),
        page_size=16,
    )


def metal_calls(rows: int, num_layers: int) -> Counter[str]:
    launches: list[str] = []

    def compile_kernel(**parts: Any) -> Callable[..., Sequence[mx.array]]:
        def launch(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            launches.append(parts["name"])
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    layers = tuple(LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64) for _ in range(num_layers))
    spec = PoolSpec(layers=layers, num_pages=64, page_size=16, k_format="fp4", v_format="fp4")
    pool, calls, options = InPlacePool(spec, KernelLibrary(compile_kernel)), Calls(), AttendOptions(scale=0.1)
    metadata = decode_step(rows)
    arrays = [mx.zeros((rows, heads, 64), mx.bfloat16) for heads in (2, 2, 8)]
    for is_second in (False, True):
        launches.clear()
        if is_second:
            calls.begin()
        pool.begin_step(metadata)
        for layer in range(num_layers):
            pool.write(layer, arrays[0], arrays[1])
            pool.attend(layer, arrays[2], options)
        pool.pending()
        calls.end()
    assert len(launches) == 2 * num_layers
    return calls.counts


def test_a_metal_step_calls_a_few_functions_for_each_layer_and_none_for_each_row() -> None:
    few, deep, wide = metal_calls(2, 1), metal_calls(2, 9), metal_calls(13, 9)
    assert wide == deep, "arrays are handled once for all rows"
    assert (deep.total() - few.total()) / 8 <= 42, (deep - few).most_common()
    uploads = "kernels/metal/launch.py:padded"
    assert deep[uploads] == few[uploads] == 6, (
        "positions, pages, rows to write, and plans, once for all layers"
    )
