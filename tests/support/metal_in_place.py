"""An emulated device whose kernels write their inputs.

The emulator forbids such writes, so the pool is passed as an output and copied back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from attention_cases import build_metadata
from metal_backend import Emulator, ones, to_mlx
from metal_checks import PAGES, bits, pages_read
from metal_emulator import MetalKernel
from octavo.kernels.interface import LayerSpec, PoolSpec
from octavo.kernels.metal.in_place import InPlacePool
from octavo.kernels.metal.launch import KernelLibrary

PAIRS = [(0, 2), (5, 1), (2, 3), (0, 6)]
"""The third copy must wait for the first."""

RECURRENT = ("delta", "ssd", "conv")
_UNTOUCHED = 123.5
"""Output of recurrences where nothing is written; exact in 16 bits."""


def memory_of(array: mx.array) -> NDArray[Any]:
    """Return the array's memory as writable unsigned integers."""
    unsigned = array.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[array.dtype.size])
    mx.eval(unsigned)
    return np.array(unsigned, copy=False)


@dataclass
class WritingDevice(Emulator):
    """A device that lets kernels write their inputs; writes of kernels in ``forgets`` are lost."""

    forgets: tuple[str, ...] = ()

    def compile(
        self, *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
    ) -> Callable[..., Sequence[mx.array]]:
        kind = name.split("_")[1]
        if kind not in ("write", "copy", *RECURRENT):
            return super().compile(
                name=name, input_names=input_names, output_names=output_names, source=source, header=header
            )
        pools = [part for part in input_names if part in PAGES or part.startswith("to_")]
        pools = [part for part in pools if kind == "write" or part not in PAGES]
        read = [part for part in input_names if part not in pools]
        kernel = MetalKernel(name, read, [*output_names, *pools], source, header)

        def launch(**arguments: Any) -> list[mx.array]:
            self.sign(name, arguments["inputs"])
            if not self.computes:
                return ones(arguments)
            inputs = dict(zip(input_names, arguments["inputs"], strict=True))
            mx.eval(list(inputs.values()))
            arrays = [inputs[part] for part in pools]
            arguments["inputs"] = [inputs[part] for part in read]
            arguments["output_shapes"] = [*arguments["output_shapes"], *(a.shape for a in arrays)]
            arguments["output_dtypes"] = [*arguments["output_dtypes"], *(a.dtype for a in arrays)]
            before = _UNTOUCHED if kind in RECURRENT else 0
            outputs = kernel(**arguments, seed=self.seed, schedule=self.schedule, init_value=before)
            assert kernel.last is not None
            self.results.append((name, kernel.last))
            assert kind != "copy" or outputs[0].all(), f"{name} left its token unwritten"
            rows = _written_rows(name, inputs, arguments["grid"])
            for array, written in zip(arrays, outputs[len(output_names) :], strict=True):
                memory = memory_of(array)
                new = written.view(memory.dtype)
                others = np.delete(written, rows, axis=0)
                assert (others == before).all(), f"{name} wrote rows that are not its own"
                if kind not in self.forgets:
                    memory[rows] = new[rows]
            return [to_mlx(output) for output in outputs[: len(output_names)]]

        return launch


def _written_rows(name: str, inputs: dict[str, mx.array], grid: tuple[int, int, int]) -> NDArray[np.int64]:
    if "segments" in inputs:
        segments = np.array(inputs["segments"])[: grid[2]]
        kept = np.array(inputs["checkpoints"]).reshape(-1, 2)
        slots = [kept[first:end, 1] for first, end in segments[:, 4:6]]
        return np.concatenate([segments[:, 3], *slots]).astype(np.int64)
    if "targets" in inputs:
        tokens, heads, _ = inputs["keys"].shape
        return np.array(inputs["targets"])[: tokens * heads].astype(np.int64)
    heads, page_size = (int(part) for part in name.split("_")[-2:])
    threads, size = 128, heads * page_size
    targets = np.array(inputs["pairs"]).reshape(-1, 2)[: grid[0] // threads, 1].astype(np.int64)
    return np.asarray((targets[:, None] * size + np.arange(size)).ravel())


def check_copies(
    formats: tuple[str, str], head_dim: int, page_size: int, device: WritingDevice | None = None
) -> WritingDevice:
    """Copy PAIRS in a pool of random bytes; each byte must be moved once."""
    device = WritingDevice() if device is None else device
    layers = tuple(LayerSpec(num_kv_heads=heads, head_dim=head_dim, value_dim=64) for heads in (1, 3))
    spec = PoolSpec(layers=layers, num_pages=9, page_size=page_size, k_format=formats[0], v_format=formats[1])
    pool, rng = InPlacePool(spec, KernelLibrary(device.compile)), np.random.default_rng(7)
    arrays = [array for layer in pool._parts for part in layer for array in part]
    want = []
    for array in arrays:
        memory = memory_of(array)
        memory[:] = rng.integers(0, 1 << 16, memory.shape)
        want.append(memory.copy().reshape(9, -1))
    pool.copy_pages(PAIRS)
    mx.eval(pool._last)
    for array, pages in zip(arrays, want, strict=True):
        for source, target in PAIRS:
            pages[target] = pages[source]
        np.testing.assert_array_equal(bits(array).reshape(9, -1), pages)
    launches = [result.traffic for result in device.ran("copy")]
    assert len(launches) == 2 * len(layers)
    read = [pages_read(result) for result in device.ran("copy")]
    written = [
        traffic.written(*(name for name in traffic.writes if name.startswith("to_"))) for traffic in launches
    ]
    for counts in (read, written):
        assert sum(count.bytes for count in counts) == spec.page_bytes * len(PAIRS)
        assert page_size < 16 or all(count.line_ratio == 1.0 for count in counts)
    return device


def check_flags(tokens: int) -> None:
    layers = tuple(LayerSpec(num_kv_heads=heads, head_dim=64, value_dim=64) for heads in (1, 9, 2))
    spec = PoolSpec(layers=layers, num_pages=2, page_size=16, k_format="fp4", v_format="int8")
    pool = InPlacePool(spec, KernelLibrary(WritingDevice().compile))
    for spoilt in (((0, 0, 2), (1, 1, 0)), ((1, 0, 1),), ()):
        pool.begin_step(build_metadata([(0, tokens)], [np.array([0], np.int32)], 16))
        for index, layer in enumerate(layers):
            rows = np.ones((2, tokens, layer.num_kv_heads, 64), np.float32)
            for at, part, token in spoilt:
                if at == index:
                    rows[part, token, -part, 63] = np.inf
            pool.write(index, mx.array(rows[0]), mx.array(rows[1]))
        (flags,) = pool.flags()
        mx.eval(flags, pool.pending())
        assert flags.shape == (tokens,)
        assert np.flatnonzero(np.array(flags)).tolist() == pool.nonfinite_tokens()
        assert pool.nonfinite_tokens() == sorted(token for _, _, token in spoilt)
