from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from check_metal import PRELUDE, Recorder, record_all, run_recurrences, run_step
from metal_backend import Emulator, needs_compiler
from metal_emulator import why_unavailable
from metal_emulator.lint import lint
from octavo.kernels.interface import LayerSpec
from octavo.kernels.metal.launch import KernelLibrary, Launch
from octavo.kernels.metal.units import METAL_FORMATS, KernelSource
from octavo.kernels.reference.backend import ReferenceBackend
from octavo.kernels.verify.selftest import first_failure, run_selftest

pytestmark = pytest.mark.parity


class Linter:
    def __init__(self) -> None:
        self.findings: dict[str, list[str]] = {}

    def __call__(
        self, *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
    ) -> Callable[..., Sequence[mx.array]]:
        def launch(*, inputs: Any, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            self.findings[name] = lint(
                name,
                input_names,
                output_names,
                source,
                header=header,
                inputs=inputs,
                output_dtypes=output_dtypes,
            )
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch


@needs_compiler
@pytest.mark.parametrize("name", METAL_FORMATS)
@pytest.mark.few(2)
def test_kernels_use_nothing_that_metal_forbids(name: str) -> None:
    linter = Linter()
    layer = LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64, window=560, keep=4)
    run_step(KernelLibrary(linter), (name, name), layer, 3, mx.bfloat16, options=True)
    kinds = {unit.split("_")[1] for unit in linter.findings}
    assert kinds == {"copy", "write", "decode", "reduce", "chunk"}
    assert {unit: found for unit, found in linter.findings.items() if found} == {}


@needs_compiler
@pytest.mark.parametrize(("dtype", "width", "height"), [(mx.bfloat16, 64, 40), (mx.float16, 48, 6)])
def test_nor_does_a_recurrence(dtype: mx.Dtype, width: int, height: int) -> None:
    linter = Linter()
    run_recurrences(KernelLibrary(linter), dtype, width=width, height=height)
    assert {unit.split("_")[1] for unit in linter.findings} == {"delta", "ssd", "conv"}
    assert {unit: found for unit, found in linter.findings.items() if found} == {}


def test_every_unit_differs_by_name() -> None:
    """MLX caches compiled kernels by name, so kernels with equal names would be confused."""
    texts = record_all()
    assert len(texts) > 300
    assert all(text.count("[[kernel]]") == 1 for text in texts.values())
    for kernel in ("write", "copy", "decode", "reduce", "chunk", "delta", "ssd", "conv"):
        assert any(f"octavo_{kernel}_" in name for name in texts), f"no {kernel} kernel was dumped"
    library = KernelLibrary(Emulator().compile)
    launch = Launch(grid=(8, 1, 1), threadgroup=(8, 1, 1), outputs=(((8,), mx.float32),))
    first = KernelSource("octavo_x", ("wide",), ("out",), "", "out[thread_position_in_grid.x] = 1;")
    if why_unavailable() is None:
        library.run(first, {"wide": mx.zeros(8)}, launch)
        with pytest.raises(AssertionError, match="two kernels are called octavo_x"):
            library.run(
                replace(first, source="out[thread_position_in_grid.x] = 2;"), {"wide": mx.zeros(8)}, launch
            )


def printed_by_mlx(folder: Path, call: Callable[..., list[mx.array]], inputs: Sequence[mx.array]) -> str:
    with tempfile.TemporaryFile("w+") as printed:
        sys.stdout.flush()
        terminal = os.dup(1)  # MLX prints from C++
        os.dup2(printed.fileno(), 1)
        try:
            mx.export_function(str(folder / "kernel.mlxfn"), call, *inputs)
        finally:
            os.dup2(terminal, 1)
            os.close(terminal)
        printed.seek(0)
        return printed.read().split("```\n", 1)[1].rsplit("\n```", 1)[0]


def test_mlx_assembles_the_text_that_the_emulator_runs(tmp_path: Path) -> None:
    recorder, texts = Recorder(), {}

    def compile_kernel(**parts: Any) -> Callable[..., Sequence[mx.array]]:
        recorded = recorder(**parts)
        kernel: Any = mx.fast.metal_kernel(**parts)

        def launch(**arguments: Any) -> Sequence[mx.array]:
            inputs = arguments.pop("inputs")
            texts[parts["name"]] = printed_by_mlx(
                tmp_path, lambda *values: kernel(inputs=list(values), verbose=True, **arguments), inputs
            )
            return recorded(inputs=inputs, **arguments)

        return launch

    layer = LayerSpec(num_kv_heads=2, head_dim=64, value_dim=128, window=560, keep=4)
    run_step(KernelLibrary(compile_kernel), ("fp4", "bf16"), layer, 2, mx.bfloat16, options=True)
    assert len(texts) == 6  # copy, write, decode with and without splits, reduce, chunk
    assert sorted(PRELUDE + text for text in texts.values()) == sorted(recorder.texts.values())


def test_small_inputs_are_refused() -> None:
    """MLX would put small inputs into another address space."""
    unit = KernelSource("octavo_x", ("small",), ("out",), "", "out[thread_position_in_grid.x] = 1;")
    launch = Launch(grid=(8, 1, 1), threadgroup=(8, 1, 1), outputs=(((8,), mx.float32),))
    with pytest.raises(ValueError, match="input small has 7 elements; pad it to 8"):
        KernelLibrary(Emulator().compile).run(unit, {"small": mx.zeros(7)}, launch)


@needs_compiler
def test_a_backend_about_to_be_used_is_tested_first() -> None:
    emulator = Emulator()
    assert first_failure(emulator.backend()) is None
    assert all(emulator.ran(kernel) for kernel in ("write", "decode", "chunk", "reduce"))


@needs_compiler
@pytest.mark.slow
def test_the_whole_self_test_passes() -> None:
    results = run_selftest(Emulator().backend())
    assert all(result.ok for result in results), results
    assert [result.name for result in results] == [result.name for result in run_selftest(ReferenceBackend())]
