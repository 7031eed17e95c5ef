"""The assembled text, compared with the text that MLX prints while it traces a kernel on a CPU."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_emulator import KernelSource, MetalCompileError, Tensor, assemble
from metal_emulator.assemble import ATTRIBUTES

pytestmark = pytest.mark.emulator

DTYPES = [mx.float16, mx.float32, mx.bfloat16, mx.int32, mx.uint32, mx.uint8, mx.int8, mx.bool_, mx.int64]
SHAPES: list[tuple[int, ...]] = [(), (3,), (7,), (8,), (4, 5), (1, 1, 2)]
TEMPLATES: list[list[tuple[str, Any]]] = [
    [],
    [("T", mx.float16)],
    [("T", mx.bfloat16), ("N", 128), ("B", True), ("M", -3)],
    [("D", 64)],
]


def mlx_text(kernel: KernelSource, inputs: list[mx.array], **arguments: Any) -> str:
    """Return MLX's input for Metal's compiler, without its utilities."""
    made: Any = mx.fast.metal_kernel(
        name=kernel.name,
        input_names=list(kernel.input_names),
        output_names=list(kernel.output_names),
        source=kernel.body,
        header=kernel.header,
        atomic_outputs=kernel.atomic_outputs,
    )

    def call(*values: mx.array) -> mx.array:
        size = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
        outputs: list[mx.array] = made(inputs=list(values), verbose=True, **size, **arguments)
        return outputs[0]

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as printed:
        sys.stdout.flush()
        terminal = os.dup(1)  # MLX prints from C++
        os.dup2(printed.fileno(), 1)
        try:
            mx.export_function(str(Path(folder) / "kernel.mlxfn"), call, *inputs)
        finally:
            os.dup2(terminal, 1)
            os.close(terminal)
        printed.seek(0)
        text = printed.read()
    return text.split("```\n", 1)[1].rsplit("\n```", 1)[0]


@pytest.mark.parametrize("seed", range(60))
def test_the_text_is_the_one_that_mlx_assembles(seed: int) -> None:
    generator = np.random.default_rng(seed)

    def pick(choices: list[Any]) -> Any:
        return choices[int(generator.integers(len(choices)))]

    inputs = [mx.zeros(pick(SHAPES), pick(DTYPES)) for _ in range(generator.integers(1, 6))]
    names = [f"in{i}" for i in range(len(inputs))]
    outputs = [f"o{i}" for i in range(generator.integers(1, 3))]
    dtypes = [pick(DTYPES) for _ in outputs]
    # MLX closes the parameter list too early with several outputs and no attribute.
    least = 1 if len(outputs) > 1 else 0
    attributes = generator.choice(list(ATTRIBUTES), generator.integers(least, 5), replace=False)
    layouts = [
        f"{name}_{part};"
        for name in names
        for part in ("shape", "strides", "ndim")
        if generator.random() < 0.4
    ]
    kernel = KernelSource(
        "nm",
        tuple(names),
        tuple(outputs),
        body="\n".join([*attributes, *layouts]) + "\n",
        header=pick(["", "// h\nstruct A {};\n"]),
        atomic_outputs=bool(generator.random() < 0.3),
    )
    template = pick(TEMPLATES)
    expected = mlx_text(
        kernel, inputs, template=template or None, output_shapes=[(1,)] * len(outputs), output_dtypes=dtypes
    )
    assembled = assemble(kernel, [Tensor.of(value) for value in inputs], dtypes, template)
    assert assembled.text.strip() == expected.strip()


def test_an_input_of_fewer_than_8_elements_is_constant() -> None:
    kernel = KernelSource("k", ("a", "b", "c"), ("o",), "o[0] = a[0] + b[0] + c;")
    inputs = [Tensor.of(np.zeros(7, np.float32)), Tensor.of(np.zeros(8, np.float32)), Tensor.of(1.0)]
    signature = assemble(kernel, inputs, ["float32"]).signature
    assert "const constant float* a [[buffer(0)]]" in signature
    assert "const device float* b [[buffer(1)]]" in signature
    assert "const constant float& c [[buffer(2)]]" in signature


def test_more_than_31_buffers_are_refused() -> None:
    names = tuple(f"b{i}" for i in range(31))
    inputs = [Tensor.of(np.zeros(9, np.float32))] * 31
    with pytest.raises(MetalCompileError, match="32 buffers: Metal binds at most 31"):
        assemble(KernelSource("k", names, ("o",), ""), inputs, ["float32"])


def test_a_forgotten_input_is_named() -> None:
    with pytest.raises(MetalCompileError, match="names 2 inputs, 1 were given"):
        assemble(KernelSource("k", ("a", "b"), ("o",), ""), [Tensor.of(1.0)], ["float32"])


def test_a_dtype_without_a_metal_type_is_refused() -> None:
    with pytest.raises(TypeError, match="'float64' has no Metal type"):
        Tensor.of(np.zeros(3))
