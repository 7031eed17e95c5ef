from __future__ import annotations

import numpy as np
import pytest

from metal_backend import needs_compiler
from metal_emulator import why_unavailable
from metal_emulator.assemble import KernelSource
from metal_emulator.resources import MAX_REGISTERS, has_target, measure
from metal_resources import examine, examine_recurrences

pytestmark = [
    pytest.mark.parity,
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.skipif(
        why_unavailable() is None and not has_target(), reason="this clang makes no code for amdgcn"
    ),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize(("dim", "group"), [(128, 1), (128, 4), (128, 8), (64, 8), (256, 2)])
def test_fp4_kernels_fit_into_registers(dim: int, group: int) -> None:
    found = examine("fp4", dim, group)
    for kernel in ("decode", "reduce", "write", "chunk"):
        assert found[kernel].registers <= MAX_REGISTERS
        assert found[kernel].scratch_bytes == 0, kernel


@pytest.mark.parametrize(
    ("name", "dim", "group"),
    [
        ("fp4", 256, 8),
        ("bf16", 128, 4),
        ("bf16", 256, 8),
        ("mxfp4", 128, 1),
        ("nvfp4", 128, 4),
        ("nvfp4", 256, 8),
        ("fp5", 256, 4),
        ("affine8", 128, 4),
    ],
)
def test_two_threadgroups_of_a_chunk_fit_into_a_core(name: str, dim: int, group: int) -> None:
    chunk = examine(name, dim, group, only="chunk")["chunk"]
    assert chunk.registers <= MAX_REGISTERS
    assert chunk.scratch_bytes == 0
    assert chunk.threadgroup_bytes <= 30_000


@pytest.mark.parametrize(("name", "heads"), [("fp4", 128), ("fp5", 16), ("bf16", 128), ("int8", 16)])
def test_latents_fit_into_registers(name: str, heads: int) -> None:
    found = examine(name, 512, heads, latents=True)
    for kernel, scratch_bytes in (("latent", 0), ("reduce", 0), ("write", 16)):  # a row is written only once
        assert found[kernel].registers <= MAX_REGISTERS
        assert found[kernel].scratch_bytes <= scratch_bytes, kernel
    assert found["latent"].threadgroup_bytes <= 30_000


@pytest.mark.parametrize(("width", "height"), [(64, 64), (128, 128), (256, 256)])
def test_states_stay_in_registers(width: int, height: int) -> None:
    found = examine_recurrences(width, height)
    assert len(found) == 2 * 3 + 1 + 2
    for name, kernel in found.items():
        assert kernel.registers <= MAX_REGISTERS, name
        assert kernel.scratch_bytes == 0, name
        lanes = width // 16
        sums = {"delta": 5, "ssd": 2, "conv": 0}[name.split("_")[1]] * (lanes.bit_length() - 1)
        assert max(loop["shuffle"] for loop in kernel.loops) == sums, name


def test_logits_and_weights_of_a_chunk_stay_in_registers() -> None:
    (loop,) = (loop for loop in examine("fp4", 128, 4, only="chunk")["chunk"].loops if loop["matrix"])
    assert loop["matrix"] == 128
    assert loop["shuffle"] == 2
    rows, quads = 2, 2 * 2
    assert loop["threadgroup store"] <= rows + quads


def test_products_are_summed_transposed() -> None:
    """Sums for 32 keys over 16 lanes take 15 shuffles per head instead of 64."""
    loops = examine("fp4", 128, 4)["decode"].loops
    assert max(loop["shuffle"] for loop in loops) == 2 * (15 + 5)
    assert max(loop["load"] for loop in loops) <= 2 * 16 + 2 + 2


def test_an_array_that_a_variable_indexes_is_found() -> None:
    kernel = KernelSource(
        "dynamic",
        ("x",),
        ("out",),
        "float a[256];\nfor (uint i = 0; i < 256; ++i) a[i] = x[i + thread_index_in_simdgroup];\n"
        "out[thread_index_in_simdgroup] = a[uint(x[thread_index_in_simdgroup]) % 256u];",
    )
    found = measure(kernel, [np.zeros(64, np.float32)], [np.float32], (32, 1, 1))
    assert found.scratch_bytes > 0
