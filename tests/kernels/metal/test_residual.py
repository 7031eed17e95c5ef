"""Attention over quantized pages and residual pages on the Metal kernels, executed from their source."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from attention_backends import poison
from attention_cases import CASES, Case
from metal_backend import Emulator, needs_compiler
from metal_cases import TOLERANCES
from metal_in_place import WritingDevice
from octavo.kernels.interface import PagedKVCache
from octavo.kernels.metal.backend import MetalBackend
from residual_cases import residual_spec, run_residual

pytestmark = [pytest.mark.parity, needs_compiler, pytest.mark.timeout(300)]
NAMED = {case.name: case for case in CASES}
RAGGED = Case(name="each its own", page_size=4, sequences=((30, 1), (30, 1), (0, 30), (20, 9)))
SPLIT = Case(name="split", page_size=32, sinks=True, sequences=((1100, 1), (3, 1)))


def create(
    backend: MetalBackend, case: Case, formats: tuple[str, str], window: int, keep: int
) -> PagedKVCache:
    spec = case.spec(*formats)
    pool = backend.create_residual_pool(spec, residual_spec(case, spec, window=window, keep=keep))
    for part in pool.storages:
        poison(part)
    return pool


@pytest.mark.parametrize(
    ("case", "formats", "window", "keep", "after", "in_place"),
    [
        (RAGGED, ("fp4", "fp4"), 1, 0, [0, 31, 16, 24], False),
        (RAGGED, ("int8", "nvfp4"), 5, 8, [0] * 4, True),
        (SPLIT, ("fp4", "fp4"), 33, 32, [0, 0], False),
        pytest.param(NAMED["softcap"], ("bf16", "int4"), 17, 0, [0, 12, 0], False, marks=pytest.mark.slow),
        pytest.param(NAMED["dim128"], ("fp4", "fp4"), 1, 16, [0, 9, 0], True, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_rows_read_each_position_from_the_kind_of_page_they_should(
    case: Case, formats: tuple[str, str], window: int, keep: int, after: list[int], in_place: bool
) -> None:
    emulator = WritingDevice() if in_place else Emulator()
    backend = emulator.backend()
    backend._writes_in_place = in_place
    got, want = run_residual(case, create(backend, case, formats, window, keep), after)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCES[mx.float32] * np.abs(want).max())
    assert emulator.ran("decode")
    assert bool(emulator.ran("chunk")) == any(new > 1 for _, new in case.sequences)
    assert all(result.reports == [] for _, result in emulator.results)


def test_layers_with_a_window_are_refused() -> None:
    with pytest.raises(ValueError, match="in layers with a window; leave sink_pages"):
        create(Emulator().backend(), NAMED["window17"], ("fp4", "fp4"), 1, 0)


def test_less_than_a_page_cannot_be_kept() -> None:
    with pytest.raises(ValueError, match="a multiple of the 32 positions of a page, got 33"):
        create(Emulator().backend(), SPLIT, ("fp4", "fp4"), 1, 33)
