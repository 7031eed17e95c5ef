from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import qwen3

import tiny_models
from native import require_extension
from octavo.engine.api.config import EngineConfig
from octavo.engine.executor.adapt import cache_adapter as hook
from octavo.engine.executor.batch import Batch, OutputSelection
from octavo.engine.executor.capture import graph_runner as replay
from octavo.engine.executor.load.discover import discover_layout
from octavo.engine.executor.load.loader import load_model
from octavo.engine.executor.load.prepare import ReadyModel, choose_device, make_ready
from octavo.engine.executor.paged_model import PagedModel
from octavo.kernels.interface import PoolSpec
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata, Ints

_ext = require_extension()

from octavo.engine.executor.native import modules  # noqa: E402
from octavo.engine.executor.native.merged import MergedLinear, observe  # noqa: E402
from octavo.kernels.cpu.backend import CpuBackend  # noqa: E402

pytestmark = pytest.mark.parity


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)
    mx.random.seed(1)


class Block(Module):
    def __init__(self, *, bias: bool = True, again: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.a = Linear(64, 96, bias=bias)
        self.b = Linear(64, 70, bias=bias)
        self.c = Linear(70, 64)
        self.again = again

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.a(x).sum() + self.c(self.b(x))
        if self.again:
            y = y + self.a(2 * x).sum()
        return y


def merged_block(dtype: mx.Dtype = mx.bfloat16, bits: int | None = None, **options: Any) -> tuple[Block, Any]:
    block = Block(**options)
    block.set_dtype(dtype)
    if bits is not None:
        quantize(block, 64, bits, class_predicate=lambda path, _: path != "c")
    seen = observe(lambda: block(mx.zeros((1, 64), dtype)))
    return block, modules.replace_modules(block, exact=False, fuse=True, observed=seen)


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_on_one_input_become_one(bits: int | None, bias: bool) -> None:
    block, report = merged_block(bits=bits, bias=bias)
    assert report.merged == {"a + b": 1}
    assert report.replaced == {"Linear": 3} if bits is None else {"QuantizedLinear": 2, "Linear": 1}
    x = mx.random.normal((5, 64)).astype(mx.bfloat16)
    together = [block.a(x), block.b(x), block(x)]
    modules.set_fused(block, False)
    apart = [block.a(x), block.b(x), block(x)]
    num_bytes = modules.packed_bytes(block)
    modules.unfuse(block)
    assert not isinstance(block.a, MergedLinear)
    assert not isinstance(block.b, MergedLinear)
    alone = [block.a(x), block.b(x), block(x)]
    for one, two, three in zip(together, apart, alone, strict=True):
        assert mx.array_equal(one, two)
        assert mx.array_equal(one, three)
    assert num_bytes <= modules.packed_bytes(block) < 1.3 * num_bytes


def test_members_may_be_called_in_any_way() -> None:
    block, _ = merged_block(mx.float32)
    x, z = mx.random.normal((3, 64)), mx.random.normal((3, 64))
    wanted = {"ax": block.a(x), "bx": block.b(x), "az": block.a(z), "bz": block.b(z)}
    assert mx.array_equal(block.b(z), wanted["bz"])
    assert mx.array_equal(block.b(x), wanted["bx"])
    assert mx.array_equal(block.a(z), wanted["az"])
    changing = z + 0
    assert mx.array_equal(block.a(changing), wanted["az"])
    changing[...] = x
    assert mx.array_equal(block.b(changing), wanted["bx"])


def test_weights_of_members_read_and_change_as_ever() -> None:
    block, _ = merged_block(mx.float32)
    plain = {name: mx.array(np.array(getattr(block, name).weight)) for name in "ab"}
    assert plain["a"].shape == (96, 64)
    assert plain["b"].shape == (70, 64)
    x = mx.random.normal((2, 64))
    assert mx.allclose(block.b(x), x @ plain["b"].T + block.b.bias, atol=1e-4)
    block.a.weight = mx.zeros((96, 64))
    assert mx.array_equal(block.b.weight, plain["b"])
    assert not (block.a(x) - block.a.bias).any()


def test_layers_that_cannot_be_merged_are_recognized() -> None:
    assert merged_block(again=True)[1].merged == {}
    block = Block()
    block.a.set_dtype(mx.float16)
    assert observe(lambda: block(mx.zeros((1, 64)))).groups == ()
    block = Block(bias=False)
    quantize(block, 32, 4, mode="mxfp4", class_predicate=lambda path, _: path != "c")
    seen = observe(lambda: block(mx.zeros((1, 64), mx.bfloat16)))
    report = modules.replace_modules(block, exact=False, fuse=True, observed=seen)
    assert len(report.apart) + len(report.merged) == 1


def ready(tmp_path: Path, architecture: str, **changes: Any) -> tuple[ReadyModel, Any]:
    folder = tiny_models.make_model(tmp_path / "model", architecture, **changes)
    return ready_from(folder, architecture, fuse=True)[:2]


def ready_from(folder: Path, architecture: str, *, fuse: bool) -> tuple[ReadyModel, Any, Any]:
    choice = choose_device(EngineConfig(model=str(folder), backend="cpu"))
    loaded = load_model(folder, weights="keep")
    layout = discover_layout(loaded.model, architecture)
    got = make_ready(loaded, layout, choice, exact=False, fuse=fuse)
    return got, loaded.model, layout


def step_of(written: Ints, counts: Sequence[int], tables: Ints) -> AttentionMetadata:
    stops = written + np.array(counts, np.int32)
    owners = np.repeat(np.arange(len(counts)), counts)
    runs = zip(written.tolist(), stops.tolist(), strict=True)
    positions = np.concatenate([np.arange(start, stop, dtype=np.int32) for start, stop in runs])
    return AttentionMetadata(
        positions=positions,
        q_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        kv_len=stops,
        groups=(
            GroupMetadata(
                slots=tables[owners, positions // 8] * np.int32(8) + positions % np.int32(8),
                page_table=tables,
            ),
        ),
        page_size=8,
    )


def ragged_logits(folder: Path, architecture: str, *, fuse: bool) -> list[mx.array]:
    got, model, layout = ready_from(folder, architecture, fuse=fuse)
    spec = PoolSpec(layers=layout.layers, num_pages=16, page_size=8, k_format="fp4", v_format="fp4")
    paged = PagedModel(
        model, layout, CpuBackend().create_pool(spec), selection=got.selection, replay=got.replays
    )
    tables = np.arange(1, 13, dtype=np.int32).reshape(3, 4)
    written, logits = np.zeros(3, np.int32), []
    rng = np.random.default_rng(3)
    for counts in ((9, 4, 1), (1, 1, 1), (1, 1, 1), (3, 1, 2), (1, 1, 1)):
        metadata = step_of(written, counts, tables)
        ids = rng.integers(0, layout.vocab_size, metadata.num_tokens).astype(np.int32)
        rows = metadata.q_start[1:] - np.int32(1)
        (out,) = paged.forward(Batch(ids, rows, metadata), OutputSelection(rows)).arrays
        mx.eval(out, *paged.kv_cache.pending())
        logits.append(out.astype(mx.float32))
        mx.eval(logits[-1])
        written = metadata.kv_len
    assert (paged.graph_runner is not None and paged.graph_runner.num_replayed > 0) == fuse
    return logits


@pytest.mark.parametrize("architecture", tiny_models.CONFIGS)
@pytest.mark.few(3)
def test_fused_and_replayed_steps_are_the_bits_of_plain_ones(tmp_path: Path, architecture: str) -> None:
    folder = tiny_models.make_model(tmp_path / "model", architecture)
    fused, plain = (ragged_logits(folder, architecture, fuse=fuse) for fuse in (True, False))
    for a, b in zip(fused, plain, strict=True):
        assert bool(mx.isfinite(a).all())
        assert mx.array_equal(a, b)


STEPS_OF_FOUR_ROWS = (
    *[((1, 1, 1, 1), 4)] * 3,
    *[((4,), 4)] * 3,
    *[((1, 1, 1, 1), 6)] * 3,
    *[((2, 2), 6)] * 3,
    ((1, 1, 1, 1), 4),
    ((4,), 4),
    ((2, 2), 6),
)


def test_steps_with_equal_row_counts_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got, model, layout = ready_from(tiny_models.make_model(tmp_path, "llama"), "llama", fuse=True)
    make, memories = _ext.Arena, []

    def counted() -> object:
        memories.append(make())
        return memories[-1]

    monkeypatch.setattr(_ext, "Arena", counted)
    spec = PoolSpec(layers=layout.layers, num_pages=32, page_size=8, k_format="fp4", v_format="fp4")
    replayed, plain = (
        PagedModel(model, layout, CpuBackend().create_pool(spec), selection=got.selection, replay=replay)
        for replay in (True, False)
    )
    every_page = np.arange(32, dtype=np.int32).reshape(4, 8)
    written, rng = np.zeros(4, np.int32), np.random.default_rng(3)
    for counts, width in STEPS_OF_FOUR_ROWS:
        tables = np.ascontiguousarray(every_page[: len(counts), :width])
        metadata = step_of(written[: len(counts)], counts, tables)
        ids = rng.integers(0, layout.vocab_size, 4).astype(np.int32)
        outs = []
        for paged in (replayed, plain):
            rows = np.arange(4, dtype=np.int32)
            (out,) = paged.forward(Batch(ids, rows, metadata), OutputSelection(rows)).arrays
            paged.evaluate([out])
            outs.append(np.array(out.astype(mx.float32)))
        np.testing.assert_array_equal(outs[0], outs[1])
        written[: len(counts)] = metadata.kv_len
    assert replayed.graph_runner is not None
    assert replayed.graph_runner.num_replayed == len(STEPS_OF_FOUR_ROWS), "the first step of a kind, too"
    assert len(memories) == 1


class Refusing:
    def __init__(self, *_: object) -> None:
        raise replay.CannotCapture("operations of several streams cannot be captured")


def test_models_that_cannot_be_captured_run_python_in_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "CapturedStep", Refusing)
    got, _ = ready(tmp_path, "qwen3_moe")
    assert got.fusion is not None
    assert got.fusion.not_fused == ""
    assert "several streams" in got.fusion.not_replayed
    assert not got.replays


def test_a_model_that_asks_for_lengths_runs_its_code_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = qwen3.Attention.__call__

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if isinstance(cache, hook.LayerCache) and cache.context.num_visible > 1000:
            raise AssertionError
        y: mx.array = original(self, x, mask, cache)
        return y

    monkeypatch.setattr(qwen3.Attention, "__call__", call)
    got, _ = ready(tmp_path, "qwen3")
    assert got.fusion is not None
    assert got.fusion.not_fused == ""
    assert "length of its context" in got.fusion.not_replayed
    assert not got.replays


def test_fusion_that_changes_a_bit_is_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = _ext.rms_norm

    def wrong(x: mx.array, weight: mx.array, eps: float, *, fuse: bool = False) -> mx.array:
        y: mx.array = original(x, weight, eps * 1.5 if fuse else eps, fuse=fuse)
        return y

    monkeypatch.setattr(_ext, "rms_norm", wrong)
    got, model = ready(tmp_path, "llama", dtype=mx.float32)
    assert got.fusion is not None
    assert "differ" in got.fusion.not_fused
    assert not any(isinstance(module, MergedLinear) for _, module in model.named_modules())


def test_a_graph_that_keeps_a_number_of_its_first_step_is_not_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offset(shim: hook.LayerCache) -> mx.array:
        return mx.array(shim.context.step.positions)

    monkeypatch.setattr(hook.LayerCache, "offset", property(offset))
    got, _ = ready(tmp_path, "llama")
    assert got.fusion is not None
    assert got.fusion.not_fused == ""
    assert "different logits" in got.fusion.not_replayed
