from __future__ import annotations

import importlib
import inspect
import io
import itertools
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="pip install '.[vision]'")

import tiny_vlm
from octavo.engine.api.image import PromptImage, Size
from octavo.engine.executor.base import EncodedImage
from octavo.engine.executor.model_ops import ImageResults, ModelOps
from octavo.engine.executor.native.image_attention import NativeImageAttention
from octavo.engine.executor.native.model_ops import NativeOps
from octavo.engine.executor.vision import portions
from octavo.engine.executor.vision.encoder import Tower
from octavo.engine.executor.vision.families import read_rules
from octavo.engine.memory.model_files import read_config
from octavo.kernels.backends import set_up_device

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:At least one mel filter"),  # of Gemma 4's audio
]


NAMES = [name for name in tiny_vlm.CONFIGS if name != "gemma4_whole"]
MODELS = list(zip(NAMES, itertools.cycle([mx.float32, mx.bfloat16]), strict=False))


@pytest.fixture(params=MODELS, ids=NAMES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, mx.Dtype]:
    name, dtype = request.param
    return tiny_vlm.make_vlm(tmp_path / name, name, dtype=dtype), dtype


def encoded(folder: Path, ops: ModelOps) -> tuple[EncodedImage, list[bool]]:
    """Return a picture's rows, and for each portion whether it had something to compute."""
    raw = read_config(folder)
    rules = read_rules(folder, raw, max_pixels=2**20)
    size = rules.size_for(Size(4 * rules.side, 6 * rules.side))
    pixels = np.random.default_rng(7).integers(0, 256, (*size, 3), np.uint8).tobytes()
    tower = Tower(folder, raw["model_type"], rules, width=64, ops=ops, exact=True)
    work, lefts = tower.encode(PromptImage.of(rules, size, pixels)), list[bool]()

    def result() -> Generator[None, None, EncodedImage]:
        return (yield from work)

    running = result()
    try:
        while True:
            next(running)
            if outputs := inspect.getgeneratorlocals(work).get("outputs"):
                lefts.append(is_left(outputs[0]))
    except StopIteration as done:
        return done.value, lefts


def is_left(array: mx.array) -> bool:
    file = io.StringIO()
    mx.export_to_dot(file, array)
    return "->" in file.getvalue()


@pytest.mark.few(5)
def test_portions_have_the_bits_of_encoding_at_once(
    model: tuple[Path, mx.Dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = model
    at_once, few = encoded(folder, NativeOps())
    monkeypatch.setattr(portions, "MULTIPLICATIONS", 1)
    found, many = encoded(folder, NativeOps())
    assert found.features.any()
    for one, other in zip(found, at_once, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert np.array_equal(one, other)
    assert sum(many) > 2 * sum(few) >= 6
    assert sum(many) > 0.7 * len(many), "a portion computes what later ones should"


@pytest.mark.few(5)
def test_native_and_mlx_vision_parts_agree(model: tuple[Path, mx.Dtype]) -> None:
    folder, dtype = model
    (native, _), (plain, _) = encoded(folder, NativeOps()), encoded(folder, ModelOps())
    error = np.abs(native.features - plain.features).max() / np.abs(plain.features).max()
    assert error < (1e-5 if dtype == mx.float32 else 0.05)


def test_only_the_thread_that_builds_an_image_is_recorded(tmp_path: Path) -> None:
    set_up_device()
    before = mx.concatenate, mx.fast.scaled_dot_product_attention, is_compiling()
    encoded(tiny_vlm.make_vlm(tmp_path / "vlm", "qwen3_vl"), ModelOps())
    rows = mx.ones((1, 1, 2, 16))
    base: Any = importlib.import_module("mlx_vlm.models.base")
    with portions.Portions(None).recording() as results, ThreadPoolExecutor(1) as other:
        assert (mx.concatenate, mx.fast.scaled_dot_product_attention, is_compiling()) == before
        assert other.submit(base.ensure_fused_sdpa, rows, rows, rows, 1.0).result().shape == rows.shape
        assert not results
        base.ensure_fused_sdpa(rows, rows, rows, 1.0)
        assert results
    assert is_compiling() == before[2]


def is_compiling() -> bool:
    calls: list[mx.array] = []

    def doubled(x: mx.array) -> mx.array:
        calls.append(x)
        return x + x

    compiled = mx.compile(doubled)
    compiled(mx.ones(1))
    compiled(mx.ones(1))
    return len(calls) == 1


@pytest.mark.parametrize(
    ("mask", "dim"), [("none", 16), ("seen", 64), ("added", 72), ("seen", 80), ("added", 128), ("none", 72)]
)
def test_each_row_attends_to_all_rows_within_the_mask(mask: str, dim: int) -> None:
    attention = NativeImageAttention(exact=True)
    random = np.random.default_rng(dim)
    for num_rows in (5, 100, 600, 100):
        q, k, v = (
            mx.array(random.normal(size=(1, heads, num_rows, dim))).astype(mx.bfloat16) for heads in (4, 2, 2)
        )
        hidden = random.random((num_rows, num_rows)) < 0.3
        hidden[:, 0] = False
        given = {
            "none": None,
            "seen": mx.array(~hidden)[None, None],
            "added": mx.array(np.where(hidden, -np.inf, 0).astype(np.float32))[None, None],
        }[mask]
        found = attention(q, k, v, 0.2, given, 24)
        assert isinstance(found, ImageResults)
        wide = [each.astype(mx.float32) for each in (q, k, v)]
        wanted = mx.fast.scaled_dot_product_attention(*wide, scale=0.2, mask=given)
        made = mx.concatenate(found.parts, axis=2).astype(mx.float32)
        np.testing.assert_allclose(np.array(made), np.array(wanted), atol=0.02)
