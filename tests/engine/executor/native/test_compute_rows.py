from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native import require_extension

pytestmark = pytest.mark.parity

_ext = require_extension()

SIZE, INNER, NUM_ROWS = 64, 96, 7
DTYPES = (mx.bfloat16, mx.float16, mx.float32)


def random(*shape: int, seed: int, dtype: mx.Dtype) -> mx.array:
    values = mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
    mx.eval(values)
    return values


class Layer:
    def __init__(self, dtype: mx.Dtype, *, fuse: bool) -> None:
        self.gain = random(SIZE, seed=1, dtype=dtype)
        self.out = _ext.pack_dense(random(SIZE, SIZE, seed=2, dtype=dtype))
        self.up = _ext.pack_dense(random(2 * INNER, SIZE, seed=3, dtype=dtype))
        self.down = _ext.pack_dense(random(SIZE, INNER, seed=4, dtype=dtype))
        self.factor = mx.array(0.5, dtype)
        self.fuse = fuse

    def norm(self, x: mx.array) -> mx.array:
        normed: mx.array = _ext.rms_norm(x, self.gain, 1e-5, fuse=self.fuse)
        return normed

    def __call__(self, x: mx.array) -> mx.array:
        mixed = mx.cumsum(self.norm(x), axis=0)
        x = x + _ext.linear(mixed, self.out)
        both = _ext.linear(self.norm(x), self.up)
        inner = _ext.gated(both[..., :INNER], both[..., INNER:], "silu")
        added: mx.array = x + (_ext.linear(inner, self.down) * self.factor).astype(mx.float32).astype(x.dtype)
        return added


def operations(x: mx.array, folder: Path) -> list[str]:
    path = folder / "graph.dot"
    mx.export_to_dot(str(path), x)
    return re.findall(r'label ="([^"]+)"', path.read_text())


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    fuse=st.booleans(),
    layers=st.integers(1, 3),
    ids=st.lists(st.integers(-NUM_ROWS, NUM_ROWS - 1), min_size=1, max_size=NUM_ROWS + 2),
)
def test_selected_rows_are_bit_identical_to_all_rows(
    dtype: mx.Dtype, fuse: bool, layers: int, ids: list[int]
) -> None:
    layer = Layer(dtype, fuse=fuse)
    start = random(NUM_ROWS, 1, SIZE, seed=5, dtype=dtype)

    def build() -> mx.array:
        x = start
        for _ in range(layers):
            x = layer(x)
        return layer.norm(x)

    rows = _ext.compute_rows(build(), mx.array(ids))
    assert rows.shape == (len(ids), 1, SIZE)
    wanted = np.array(build().astype(mx.float32))[ids]
    assert np.array_equal(np.array(rows.astype(mx.float32)), wanted)


def test_layers_after_the_last_mixing_compute_only_wanted_rows(tmp_path: Path) -> None:
    layer = Layer(mx.bfloat16, fuse=True)
    x = layer.norm(layer(layer(random(NUM_ROWS, 1, SIZE, seed=5, dtype=mx.bfloat16))))
    names = operations(_ext.compute_rows(x, mx.array([3])), tmp_path)
    last_mixing = max(i for i, name in enumerate(names) if name == "CumSum")
    assert names.count("octavo.select_rows") == 2
    assert "octavo.linear" not in names[last_mixing : names.index("octavo.select_rows")]
    assert sorted(name for name in names if name != "octavo.select_rows") == sorted(operations(x, tmp_path))


def test_all_rows_are_left_to_be_selected(tmp_path: Path) -> None:
    layer = Layer(mx.bfloat16, fuse=True)
    x = layer(random(NUM_ROWS, 1, SIZE, seed=5, dtype=mx.bfloat16))
    names = operations(_ext.compute_rows(x, mx.arange(NUM_ROWS)), tmp_path)
    assert names[-1] == "octavo.select_rows"


def test_rows_of_a_gate_that_are_not_those_of_its_product_are_computed_whole() -> None:
    layer = Layer(mx.bfloat16, fuse=True)
    start = random(NUM_ROWS, SIZE, seed=5, dtype=mx.bfloat16)

    def build() -> mx.array:
        both = _ext.linear(start, layer.up)
        halves = both.reshape(2 * NUM_ROWS, INNER)
        product: mx.array = _ext.linear(_ext.gated(halves[:NUM_ROWS], None, "silu"), layer.down)
        return product

    rows = _ext.compute_rows(build(), mx.array([1, 5]))
    assert mx.array_equal(rows, build()[mx.array([1, 5])])
