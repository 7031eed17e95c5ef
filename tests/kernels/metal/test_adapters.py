from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import tiny_adapters
import tiny_models
from adapter_checks import normal, wide
from metal_backend import Emulator, needs_compiler
from metal_engine import metal_engine
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.frontend.llm import LLM
from octavo.kernels.metal.adapters import MetalAdapterTable, adapter_problem
from octavo.kernels.metal.launch import KernelLibrary

pytestmark = [pytest.mark.parity, needs_compiler, pytest.mark.timeout(300)]

INPUTS, OUTPUTS, RANKS = 100, (48, 70, 4), (4, 1, 19)
SLOTS = [2, 0, 1, 3, 0, *[3] * 11, 1]  # a block of four rows in one slot, among others
Factors = dict[tuple[int, int], Any]


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)


def make_factors(dtype: mx.Dtype, *, gain: bool) -> Factors:
    rng, factors = np.random.default_rng(0), {}
    for slot, rank in enumerate(RANKS, 1):
        for layer, count in enumerate(OUTPUTS):
            if (slot + layer) % 4 == 3:
                continue
            a, b = normal(rng, (rank, INPUTS), dtype, 0.1), normal(rng, (rank, count), dtype, 0.5)
            has_gain = gain and slot != 2
            g = normal(rng, (count,), mx.float32) if has_gain else None
            factors[slot, layer] = (
                a, b, 0.5 * slot, g, normal(rng, (count,), mx.float32) if slot == 1 else None,
            )  # fmt: skip
    return factors


def run(library: KernelLibrary, factors: Factors, ys: list[mx.array], x: mx.array, slots: Any) -> Any:
    dtype = next(iter(factors.values()))[0].dtype
    table = MetalAdapterTable(library, INPUTS, OUTPUTS, num_slots=len(RANKS), dtype=dtype)
    for (slot, layer), each in factors.items():
        table.put(slot, layer, *each)
    outputs = table.add(ys, x, mx.array(slots, mx.int32))
    mx.eval(outputs)
    return outputs


def expected(factors: Factors, layer: int, y: Any, x: Any) -> Any:
    want = y.copy()
    for row, slot in enumerate(SLOTS):
        if (found := factors.get((slot, layer))) is not None:
            a, b, scale, gain, bias = found
            total = scale * (x[row] @ wide(a).T) @ wide(b)
            shift = 0 if bias is None else wide(bias)
            want[row] = y[row] + total if gain is None else wide(gain) * (y[row] - shift + total) + shift
    return want


@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize(
    ("dtype", "x_type", "limit"),
    [(mx.float32, mx.float32, 1e-6), (mx.bfloat16, mx.bfloat16, 2**-8), (mx.float32, mx.float16, 2**-11)],
)
def test_outputs_are_those_of_float64_and_of_each_row_alone(
    dtype: mx.Dtype, x_type: mx.Dtype, limit: float, gain: bool
) -> None:
    rng, factors, emulator = np.random.default_rng(1), make_factors(dtype, gain=gain), Emulator()
    library = KernelLibrary(emulator.compile)
    x = normal(rng, (len(SLOTS), INPUTS), x_type)
    ys = [normal(rng, (len(SLOTS), count), x_type) for count in OUTPUTS]
    outputs = run(library, factors, ys, x, SLOTS)
    assert emulator.launches == {"shrink": 1, "expand": 1}
    for layer, (y, got) in enumerate(zip(ys, outputs, strict=True)):
        want = expected(factors, layer, wide(y), wide(x))
        assert np.abs(wide(got) - want).max() <= limit * np.abs(want).max()
        assert mx.array_equal(got[4], y[4]), "a row without an adapter was changed"
    for row in (0, 9):
        alone = run(library, factors, [y[row : row + 1] for y in ys], x[row : row + 1], SLOTS[row : row + 1])
        assert all(mx.array_equal(one[0], many[row]) for one, many in zip(alone, outputs, strict=True))


def test_a_cleared_slot_adds_nothing() -> None:
    library = KernelLibrary(Emulator().compile)
    table = MetalAdapterTable(library, INPUTS, OUTPUTS, num_slots=1, dtype=mx.float32)
    ys, x, slots = (
        [mx.ones((2, count)) for count in OUTPUTS],
        mx.ones((2, INPUTS)),
        mx.array([1, 1], mx.int32),
    )
    table.put(1, 0, mx.ones((4, INPUTS)), mx.ones((4, OUTPUTS[0])), 1.0, None, None)
    assert table.add(ys, x, slots)[0][0, 0].item() == 1 + 4 * INPUTS
    table.clear(1)
    assert all(mx.array_equal(y, got) for y, got in zip(ys, table.add(ys, x, slots), strict=True))


def test_kernels_that_fail_their_self_test_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    assert adapter_problem(KernelLibrary(Emulator().compile)) is None
    assert Emulator(computes=False).backend().adapter_tables is None
    assert (
        "MLX's operations add adapters: the Metal kernels fail their self-test (outputs have error"
        in caplog.text
    )


@pytest.mark.slow
def test_an_engine_adds_them_in_two_launches_for_layers_of_one_input(tmp_path: Path) -> None:
    """A layer has four inputs: one for q, k and v, one for o, one for gate and up, one for down."""
    model = tiny_models.make_model(tmp_path / "model", "qwen3", dtype=mx.float32)
    modules = []
    for kind, rank in (("lora", 4), ("dora", 3)):
        folder = tiny_adapters.make_adapter(
            tmp_path / kind, model, rank=rank, scale=20.0, kind=kind, seed=rank
        )
        modules.append(f"{kind}={folder}")
    settings: dict[str, Any] = {
        "page_size": 16, "num_pages": 40, "kv_format": "fp16", "lora_modules": tuple(modules), "max_loras": 2,
    }  # fmt: skip
    prompts, adapters = [[(7 * j + 3) % 300 for j in range(n)] for n in (5, 9, 4)], ["lora", "dora", None]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)

    def answers(llm: LLM) -> list[list[int]]:
        return [each.outputs[0].token_ids for each in llm.generate(prompts, params, adapter=adapters)]

    with LLM(EngineConfig(model=str(model), backend="reference", **settings)) as llm:
        wanted = answers(llm)
    device = Emulator()
    with metal_engine(model, device, **settings) as llm:
        device.results.clear()
        found = answers(llm)
    layers = 4
    steps = device.launches["shrink"] // (4 * layers)
    assert device.launches["shrink"] == device.launches["expand"] == 4 * layers * steps
    assert steps in (4, 5)
    assert found == wanted
