from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from attention_backends import poison
from attention_cases import Case, build_metadata, run_case, with_table
from metal_backend import Emulator, needs_compiler
from metal_cases import EVERYTHING
from metal_emulator import MetalRuntimeError
from metal_in_place import check_copies, check_flags
from octavo.kernels.interface import AttendOptions
from octavo.kernels.metal.backend import MetalBackend
from octavo.kernels.metal.launch import KernelLibrary
from octavo.kernels.metal.pool import MetalPool

pytestmark = [pytest.mark.parity, needs_compiler, pytest.mark.timeout(300)]


Calls = list[tuple[str, dict[str, mx.array], list[mx.array]]]
"""Launches: (name, inputs by name, outputs)."""

TWO_PAGES = Case(name="", sequences=((0, 16),), page_size=16)


def recorded_by(device: Emulator, calls: Calls) -> KernelLibrary:
    def recorded(**parts: Any) -> Callable[..., Sequence[mx.array]]:
        launch = device.compile(**parts)

        def call(**arguments: Any) -> Sequence[mx.array]:
            outputs = list(launch(**arguments))
            inputs = dict(zip(parts["input_names"], arguments["inputs"], strict=True))
            calls.append((parts["name"], inputs, outputs))
            return outputs

        return call

    return KernelLibrary(recorded)


def read_only(emulator: Emulator) -> KernelLibrary:
    def compile_kernel(**parts: Any) -> Callable[..., Sequence[mx.array]]:
        launch = emulator.compile(**parts)

        def guarded(**arguments: Any) -> Sequence[mx.array]:
            try:
                return launch(**arguments)
            except MetalRuntimeError as error:
                raise RuntimeError(str(error)) from error

        return guarded

    return KernelLibrary(compile_kernel)


def test_kernels_on_a_layers_pages_run_in_the_order_of_their_launches() -> None:
    calls: Calls = []
    case = EVERYTHING
    pool = MetalPool(case.spec("fp4", "fp4"), recorded_by(Emulator(), calls))
    poison(pool)
    run_case(case, pool, dtype=mx.float16)
    writes = [call for call in calls if call[0].startswith("octavo_write_")]
    assert len(writes) == 2
    on_pages = [call for call in calls if not call[0].startswith("octavo_reduce_")]
    assert len(on_pages) > 4
    for (_, _, before), (name, inputs, _) in itertools.pairwise(on_pages):
        assert inputs["after"] is before[-1], name
    assert all(outputs[-1].dtype == mx.bool_ for _, _, outputs in on_pages), "one kernel, whoever was last"


@pytest.mark.parametrize("tokens", [3, 9])
def test_a_token_with_a_row_that_cannot_be_stored_is_reported_by_whatever_layer(tokens: int) -> None:
    check_flags(tokens)


def test_pages_are_copied_and_gathered() -> None:
    pool = MetalPool(TWO_PAGES.spec("fp4", "bf16"), Emulator().backend().library)
    poison(pool)
    rng = np.random.default_rng(5)
    rows = [mx.array(rng.standard_normal((16, 2, 64)).astype(np.float32)) for _ in "kv"]
    step = build_metadata([(0, 16)], [np.array([0], np.int32)], 16)
    pool.begin_step(step)
    pool.write(0, *rows)
    want = [np.array(array) for array in pool.gather_sequences(0)]
    mx.eval(pool.pending())
    pool.copy_pages([(0, 2), (2, 3)])
    pool.begin_step(with_table(step, np.array([[3]], np.int32)))
    for got, array in zip(pool.gather_sequences(0), want, strict=True):
        np.testing.assert_array_equal(np.array(got), array)
    pool.write_pages([1], pool.read_pages([0]))
    pool.begin_step(with_table(step, np.array([[1]], np.int32)))
    for got, array in zip(pool.gather_sequences(0), want, strict=True):
        np.testing.assert_array_equal(np.array(got), array)
    with pytest.raises(ValueError, match="page 99 lies outside the pool"):
        pool.copy_pages([(0, 99)])


@pytest.mark.parametrize(
    ("formats", "head_dim", "page_size"),
    [
        (("fp4", "fp4"), 64, 16),
        (("bf16", "fp4"), 80, 32),
        (("fp16", "bf16"), 128, 16),
        (("fp4", "fp4"), 8, 2),
    ],
)
def test_a_copy_moves_the_pages_bytes_once(formats: tuple[str, str], head_dim: int, page_size: int) -> None:
    check_copies(formats, head_dim, page_size)


def test_a_copy_waits_for_writers_and_readers_and_they_for_it() -> None:
    calls: Calls = []
    pool = MetalPool(TWO_PAGES.spec("fp4", "fp4"), recorded_by(Emulator(), calls))
    poison(pool)
    rows = mx.ones((16, 2, 64))
    step = build_metadata([(0, 16)], [np.array([0], np.int32)], 16)
    for pairs in ([(0, 2), (2, 3)], []):
        pool.begin_step(step)
        pool.write(0, rows, rows)
        out = pool.attend(0, rows, AttendOptions(scale=0.1))
        mx.eval(out, pool.pending())
        pool.copy_pages(pairs)
    kinds = [name.split("_")[1] for name, _, _ in calls]
    assert kinds == ["write", "chunk", "copy", "copy", "write", "chunk"]
    for (_, _, before), (name, inputs, _) in itertools.pairwise(calls):
        assert inputs["after"] is before[-1], name


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        (Emulator(), None),
        (Emulator(forgets=("write",)), "write, fp4, window, kept positions, sinks, softcap"),
        (Emulator(forgets=("copy",)), "pages are copied"),
        (Emulator(refuses=True), "fp4: "),
    ],
    ids=["writes", "forgets writes", "forgets copies", "refuses"],
)
def test_a_device_that_cannot_write_in_place_is_noticed(device: Emulator, problem: str | None) -> None:
    found = MetalBackend(read_only(device)).find_problem()
    assert found is None if problem is None else str(found).startswith(problem)
