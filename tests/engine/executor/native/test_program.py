from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from native import require_extension
from octavo.kernels.metadata import Ints

pytestmark = pytest.mark.parity

_ext = require_extension()

Floats = np.ndarray[Any, np.dtype[np.float32]]
Build = Callable[[mx.array], Sequence[mx.array]]


def random(*shape: int, seed: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    values = mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
    mx.eval(values)
    return values


def make_layers(dtype: mx.Dtype) -> Build:
    table, gain = random(50, 64, seed=1, dtype=dtype), random(64, seed=2, dtype=dtype)
    up, down = _ext.pack_dense(random(96, 64, seed=3, dtype=dtype)), random(64, 48, seed=4, dtype=dtype)
    down_packed = _ext.pack_dense(down)

    def build(ids: mx.array) -> list[mx.array]:
        x = _ext.select_rows(table, ids)
        for _ in range(3):
            y = _ext.linear(_ext.rms_norm(x, gain + 1, 1e-5), up)
            inner = _ext.gated(y[:, :48], y[:, 48:], "silu")
            heads = inner.reshape(-1, 4, 12).transpose(1, 0, 2)
            x = x + _ext.linear(inner, down_packed) * mx.array(0.25, dtype)
            x = x.astype(mx.float32).astype(dtype)
        best, largest = _ext.linear_argmax(x, up)
        return [x, heads.reshape(4, -1), best, largest]

    return build


def record(build: Build, size: int, arena: Any) -> Callable[[Ints], list[Floats]]:
    ids = mx.array(np.zeros(size, np.int32))
    program = _ext.Program(arena, [ids], [], list(build(ids)))

    def run(values: Ints) -> list[Floats]:
        program.run([values])
        return [numbers(out) for out in program.outputs]

    return run


def numbers(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32))


def random_ids(rng: np.random.Generator, size: int) -> Ints:
    return rng.integers(0, 50, size).astype(np.int32)


def test_memory_of_results_that_were_read_is_used_again() -> None:
    x = random(8, 4096, seed=5)
    gain = random(4096, seed=6)

    def chain(length: int) -> Build:
        def build(ids: mx.array) -> list[mx.array]:
            y = _ext.select_rows(x, ids)
            for _ in range(length):
                y = _ext.rms_norm(y, gain, 1e-5)
            return [y]

        return build

    short, long = _ext.Arena(), _ext.Arena()
    record(chain(2), 8, short)
    run = record(chain(40), 8, long)
    assert long.nbytes == short.nbytes
    for _ in range(2):
        record(chain(3), 8, long)
    assert long.nbytes == short.nbytes
    ids: Ints = np.arange(8, dtype=np.int32)
    np.testing.assert_array_equal(run(ids)[0], numbers(chain(40)(mx.array(ids))[0]))


def route(dtype: mx.Dtype) -> Build:
    table, up = random(50, 64, seed=9, dtype=dtype), _ext.pack_dense(random(64, 64, seed=3, dtype=dtype))

    def build(ids: mx.array) -> list[mx.array]:
        x = _ext.select_rows(table, ids)
        for _ in range(3):
            weights = mx.softmax(_ext.linear(x, up), axis=-1, precise=True)
            chosen = mx.argpartition(weights, kth=-8, axis=-1)[..., -8:]
            scores = mx.take_along_axis(weights, chosen, axis=-1)
            scores = scores / scores.sum(axis=-1, keepdims=True)
            order = mx.argsort(chosen.flatten())
            rows = x[order // 8][mx.argsort(order)].reshape(-1, 8, 64)
            x = _ext.rms_norm((rows * scores[..., None]).sum(axis=-2).astype(dtype), None, 1e-5)
        steps = mx.floor((mx.arange(3) + ids[:, None]) / 7)
        columns = mx.log1p(steps.transpose())  # MLX keeps the strides of its input
        return [x, chosen, columns, ids + 1, mx.stack([ids > 9, ids < 20]), x.T]

    return build


@pytest.mark.parametrize("make", [make_layers, route])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_programs_that_share_memory_give_the_bits_of_their_graphs(
    make: Callable[[mx.Dtype], Build], dtype: mx.Dtype
) -> None:
    build, arena, rng = make(dtype), _ext.Arena(), np.random.default_rng(0)
    small, large = record(build, 3, arena), record(build, 17, arena)
    for size in (3, 17, 17, 3, 17):
        ids = random_ids(rng, size)
        wanted = build(mx.array(ids))
        for got, array in zip((small if size == 3 else large)(ids), wanted, strict=True):
            np.testing.assert_array_equal(got, numbers(array))


def test_only_complex_operations_are_left_to_mlx() -> None:
    table, ids = random(50, 64, seed=9), mx.array(np.zeros(4, np.int32))
    x = _ext.select_rows(table, ids)
    views = _ext.Program(_ext.Arena(), [ids], [], [x.T + x.T, (x * x).astype(mx.float32)])
    assert views.num_evaluated == 0
    x = _ext.select_rows(table, ids)
    most = _ext.Program(_ext.Arena(), [ids], [], [mx.max(x, axis=1) + 1])
    assert most.num_evaluated == 1
    assert most.num_tasks > 1


def test_a_failure_between_operations_of_mlx_ends_the_run_and_not_the_program() -> None:
    table = random(50, 64, seed=9)
    run = record(
        lambda ids: [mx.max(_ext.rms_norm(_ext.select_rows(table, ids), None, 1e-5), axis=1)], 3, _ext.Arena()
    )
    with pytest.raises(ValueError, match="row 50 is outside the 50 rows"):
        run(np.array([0, 50, 1], np.int32))
    ids: Ints = np.array([3, 9, 49], np.int32)
    wanted = mx.max(_ext.rms_norm(_ext.select_rows(table, mx.array(ids)), None, 1e-5), axis=1)
    np.testing.assert_array_equal(run(ids)[0], numbers(wanted))


def test_outputs_without_inputs_cannot_be_captured() -> None:
    table, arena = random(50, 64, seed=9), _ext.Arena()
    with pytest.raises(ValueError, match="an output depends on no input"):
        record(lambda _: [mx.max(table)], 4, arena)
    assert not mx.isnan(_ext.rms_norm(table, None, 1e-5)).any(), "later work goes to MLX's stream again"


def test_values_must_fit_and_rows_must_exist() -> None:
    table, arena = random(50, 64, seed=10), _ext.Arena()
    with pytest.raises(ValueError, match="must be evaluated int32 arrays"):
        _ext.Program(arena, [mx.zeros(3)], [], [])
    run = record(lambda ids: [_ext.select_rows(table, ids)], 4, arena)
    with pytest.raises(ValueError, match=r"input 0 of the program has shape \[4\], got 5 values"):
        run(np.zeros(5, np.int32))
    with pytest.raises(ValueError, match="row 50 is outside the 50 rows"):
        run(np.array([0, 1, 50, 3], np.int32))
    ids: Ints = np.array([0, 49, -1, 7], np.int32)
    np.testing.assert_array_equal(run(ids)[0], numbers(table)[ids])
    with pytest.raises(ValueError, match="has 1 inputs, got 2 values"):
        _ext.Program(arena, [mx.array(ids)], [], []).run([ids, ids])


def test_an_array_fills_one_input_or_several() -> None:
    inputs = [mx.array(np.zeros(size, np.int32)) for size in (2, 3, 1)]
    mx.eval(inputs)
    table = random(50, 64, seed=12)
    results = [_ext.select_rows(table, each) for each in inputs]
    program = _ext.Program(_ext.Arena(), inputs, [table], results)
    ids: Ints = np.array([7, 0, 49, 3, 3, 21], np.int32)
    wanted = numbers(table)[ids]
    for ends in ([6], [2, 6], [5, 6], [2, 5, 6]):
        program.run([np.zeros(6, np.int32)])
        program.run(np.split(ids, ends[:-1]))
        np.testing.assert_array_equal(np.concatenate([numbers(each) for each in program.outputs]), wanted)
    for ends, problem in (
        ([1, 6], r"input 0 of the program has shape \[2\], got 1 values"),
        ([3, 6], "got 3 values, which end inside of an input"),
        ([2, 4, 6], r"input 1 of the program has shape \[3\], got 2 values"),
    ):
        with pytest.raises(ValueError, match=problem):
            program.run(np.split(ids, ends[:-1]))
    for given, problem in (
        ([ids[:5]], "for 2 of them"),
        ([], "for 0 of them"),
        ([ids, ids[:1]], "got 2 values"),
    ):
        with pytest.raises(ValueError, match=problem):
            program.run(given)
    for other in (ids.astype(np.int64), ids.astype(np.float32), np.repeat(ids, 2)[::2]):
        with pytest.raises(TypeError, match="values must be arrays of int32 without gaps"):
            program.run([other])


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32, mx.int32])
def test_rows_are_those_of_numpy(dtype: mx.Dtype) -> None:
    x = (random(6, 5, 3, seed=11, dtype=mx.float32) * 100).astype(dtype).transpose(1, 0, 2)
    ids: Ints = np.array([[4, 0], [-5, 2]], np.int32)
    np.testing.assert_array_equal(numbers(_ext.select_rows(x, mx.array(ids))), numbers(x)[ids])
    with pytest.raises(ValueError, match="ids must be integers"):
        _ext.select_rows(x, mx.zeros(2))
    with pytest.raises(ValueError, match="2-byte or 4-byte"):
        _ext.select_rows(mx.zeros((3, 2), mx.uint8), mx.array(ids))
