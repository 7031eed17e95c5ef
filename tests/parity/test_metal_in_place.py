"""Writing pages in place: the kernel and its order by tokens, and how a device that cannot is noticed.

The emulator does not let a kernel write its inputs, so here the pool is given to the writer as an
output and its rows are put into the pool's memory afterwards, as the device would have done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from attention_backends import poison
from attention_cases import Case, build_metadata, run_case
from metal_backend import Emulator, needs_compiler, to_mlx
from metal_cases import EVERYTHING, TOLERANCES
from metal_emulator import MetalKernel, MetalRuntimeError
from octavo.kernels import backends
from octavo.kernels.backends import choose_backend
from octavo.kernels.metal.backend import MetalBackend
from octavo.kernels.metal.in_place import InPlacePool
from octavo.kernels.metal.launch import KernelLibrary
from octavo.kernels.metal.pool import MetalPool

pytestmark = [needs_compiler, pytest.mark.timeout(300)]


def memory_of(array: mx.array) -> NDArray[Any]:
    """The array's own bytes as unsigned integers, writable."""
    unsigned = array if array.dtype == mx.uint32 else array.view(mx.uint16)
    mx.eval(unsigned)
    return np.array(unsigned, copy=False)


@dataclass
class WritingDevice(Emulator):
    """A device that lets kernels write their inputs; ``forgets`` one that loses what they wrote."""

    forgets: bool = False

    def compile(
        self, *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
    ) -> Callable[..., Sequence[mx.array]]:
        if not name.startswith("octavo_write_"):
            return super().compile(
                name=name, input_names=input_names, output_names=output_names, source=source, header=header
            )
        pools = [part for part in ("codes", "scales") if part in input_names]
        read = [part for part in input_names if part not in pools]
        kernel = MetalKernel(name, read, [*output_names, *pools], source, header)

        def launch(**arguments: Any) -> list[mx.array]:
            inputs = dict(zip(input_names, arguments["inputs"], strict=True))
            mx.eval(list(inputs.values()))
            arrays = [inputs[part] for part in pools]
            arguments["inputs"] = [inputs[part] for part in read]
            arguments["output_shapes"] = [*arguments["output_shapes"], *(a.shape for a in arrays)]
            arguments["output_dtypes"] = [*arguments["output_dtypes"], *(a.dtype for a in arrays)]
            outputs = kernel(**arguments, seed=self.seed, init_value=0)
            assert kernel.last is not None
            self.results.append((name, kernel.last))
            rows = np.array(inputs["targets"])[: len(inputs["rows"])]
            for array, written in zip(arrays, outputs[len(output_names) :], strict=True):
                memory = memory_of(array)
                if not self.forgets:
                    memory[rows] = written.view(memory.dtype)[rows]
            return [to_mlx(output) for output in outputs[: len(output_names)]]

        return launch


def read_only(emulator: Emulator) -> KernelLibrary:
    """The emulator as it is, its refusals raised as MLX raises them."""

    def compile_kernel(**parts: Any) -> Callable[..., Sequence[mx.array]]:
        launch = emulator.compile(**parts)

        def guarded(**arguments: Any) -> Sequence[mx.array]:
            try:
                return launch(**arguments)
            except MetalRuntimeError as error:
                raise RuntimeError(str(error)) from error

        return guarded

    return KernelLibrary(compile_kernel)


@pytest.mark.parametrize("formats", [("fp4", "fp4"), ("bf16", "fp16")], ids="-".join)
def test_pages_written_in_place_are_attended_to(formats: tuple[str, str]) -> None:
    device = WritingDevice()
    backend = MetalBackend(KernelLibrary(device.compile))
    assert backend.try_in_place() == "pages are written in place"
    pool = backend.create_pool(EVERYTHING.spec(*formats))
    assert isinstance(pool, InPlacePool)
    poison(pool)
    before = [array.shape for part in pool._parts[0] for array in part]
    assert run_case(EVERYTHING, pool, dtype=mx.float16).error < TOLERANCES[mx.float16]
    assert [array.shape for part in pool._parts[0] for array in part] == before
    assert device.ran("quantize") == []
    assert len(device.ran("write")) >= 4


def test_every_reader_waits_for_the_writers_and_every_writer_for_the_reader() -> None:
    calls: list[tuple[str, dict[str, mx.array], list[mx.array]]] = []
    device = WritingDevice()

    def recorded(**parts: Any) -> Callable[..., Sequence[mx.array]]:
        launch = device.compile(**parts)

        def call(**arguments: Any) -> Sequence[mx.array]:
            outputs = list(launch(**arguments))
            calls.append(
                (parts["name"], dict(zip(parts["input_names"], arguments["inputs"], strict=True)), outputs)
            )
            return outputs

        return call

    case = EVERYTHING
    pool = InPlacePool(case.spec("fp4", "fp4"), KernelLibrary(recorded))
    poison(pool)
    run_case(case, pool, dtype=mx.float16)
    writes = [call for call in calls if call[0].startswith("octavo_write_")]
    reads = [call for call in calls if call[0].startswith(("octavo_decode_", "octavo_chunk_"))]
    assert len(writes) == 4
    for _, inputs, _ in reads:
        made = [outputs[0] for _, _, outputs in writes]
        assert any(inputs["k_written"] is array for array in made)
        assert any(inputs["v_written"] is array for array in made)
    assert writes[0][1]["after"].size == 8
    assert writes[2][1]["after"] is writes[3][1]["after"]
    assert writes[2][1]["after"].shape[1:] == (case.kv_heads * case.group, case.head_dim)


@pytest.mark.parametrize("in_place", [False, True])
def test_pages_are_copied_and_gathered(in_place: bool) -> None:
    """A fork: page 0 is copied onto page 2 and 2 onto 3, in order; then both are read densely."""
    device = WritingDevice()
    kind = InPlacePool if in_place else MetalPool
    case = Case(name="", sequences=((0, 16),), page_size=16)
    pool = kind(case.spec("fp4", "bf16"), KernelLibrary(device.compile))
    poison(pool)
    rng = np.random.default_rng(5)
    rows = [mx.array(rng.standard_normal((16, 2, 64)).astype(np.float32)) for _ in "kv"]
    step = build_metadata([(0, 16)], [np.array([0], np.int32)], 16)
    pool.begin_step(step)
    pool.write(0, *rows)
    want = [np.array(array) for array in pool.gather(0)]
    mx.eval(pool.pending())
    pool.copy_pages([(0, 2), (2, 3)])
    pool.begin_step(replace(step, page_table=np.array([[3]], np.int32)))
    for got, array in zip(pool.gather(0), want, strict=True):
        np.testing.assert_array_equal(np.array(got), array)
    with pytest.raises(ValueError, match="page 99 lies outside the pool"):
        pool.copy_pages([(0, 99)])


@pytest.mark.parametrize("kind", ["forgets", "refuses"])
def test_a_device_that_cannot_is_noticed_and_serves_without(kind: str) -> None:
    library = (
        KernelLibrary(WritingDevice(forgets=True).compile) if kind == "forgets" else read_only(Emulator())
    )
    backend = MetalBackend(library)
    said = backend.try_in_place()
    assert said.startswith("pages are not written in place: its self-test failed (")
    assert not backend.writes_in_place
    pool = backend.create_pool(EVERYTHING.spec("fp4", "fp4"))
    assert type(pool) is MetalPool
    poison(pool)
    assert run_case(EVERYTHING, pool, dtype=mx.float16).error < TOLERANCES[mx.float16]


def test_it_is_asked_for_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert "place" not in choose_backend("metal").reason
    monkeypatch.setenv(backends.IN_PLACE_VARIABLE, "1")
    assert "; pages are not written in place: its self-test failed (" in choose_backend("metal").reason
