from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from attention_cases import CASES, Case, build_metadata
from metal_backend import Emulator, needs_compiler
from metal_cases import TOLERANCES
from metal_residual import watched_cache
from octavo.kernels.interface import AttendOptions, PagedKVCache
from residual_cases import residual_spec, run_residual

pytestmark = [pytest.mark.parity, needs_compiler, pytest.mark.timeout(300)]
NAMED = {case.name: case for case in CASES}
RAGGED = Case(name="each its own", page_size=4, sequences=((30, 1), (30, 1), (0, 30), (20, 9)))
SPLIT = Case(name="split", page_size=32, sinks=True, sequences=((1100, 1), (3, 1)))


def windowed(name: str, page_size: int, window: int, **rest: Any) -> Case:
    sequences = rest.pop("sequences", ((50, 1), (0, 45), (30, 9), (0, 1), (90, 1)))
    return Case(name=f"window {name}", page_size=page_size, window=window, sequences=sequences, **rest)


LONG = windowed("split", 32, 600, keep=3, sinks=True, kv_heads=1, sequences=((1100, 1), (3, 1), (700, 2)))
WINDOWED = (
    (windowed("of a page", 8, 5), ("fp4", "fp4"), 1, [0] * 5),
    (windowed("of three pages", 16, 40), ("fp4", "fp4"), 17, [0] * 5),
    (windowed("within the residual one", 32, 40), ("fp4", "fp4"), 33, [0] * 5),
    (windowed("kept", 16, 41, keep=20, sinks=True, softcap=8.0), ("int4", "fp5"), 5, [0, 40, 33, 0, 80]),
    (windowed("kept page", 8, 21, keep=16, group=3), ("fp5", "int4"), 9, [0] * 5),
    (windowed("whole", 16, 40, whole=(2, 8)), ("fp4", "fp4"), 17, [0] * 5),
    (LONG, ("fp4", "fp4"), 33, [0, 0, 701]),
)


@pytest.mark.parametrize(
    ("case", "formats", "window", "keep", "after"),
    [
        (RAGGED, ("fp4", "fp4"), 1, 0, [0, 31, 16, 24]),
        (RAGGED, ("int8", "nvfp4"), 5, 8, [0] * 4),
        (replace(RAGGED, name="whole", whole=(3, 8)), ("fp4", "fp4"), 5, 8, [0] * 4),
        (SPLIT, ("fp4", "fp4"), 33, 32, [0, 0]),
        pytest.param(NAMED["softcap"], ("bf16", "int4"), 17, 0, [0, 12, 0], marks=pytest.mark.slow),
        *((case, formats, window, 0, after) for case, formats, window, after in WINDOWED[:2]),
        *(
            pytest.param(case, formats, window, 0, after, marks=pytest.mark.slow)
            for case, formats, window, after in WINDOWED[2:]
        ),
        pytest.param(NAMED["dim128"], ("fp4", "fp4"), 1, 16, [0, 9, 0], marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_rows_read_each_position_from_the_kind_of_page_they_should(
    case: Case, formats: tuple[str, str], window: int, keep: int, after: list[int]
) -> None:
    emulator = Emulator()
    cache = watched_cache(emulator, emulator.backend(), case, formats, window=window, keep=keep)
    got, want = run_residual(case, cache, after)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCES[mx.float32] * np.abs(want).max())
    assert emulator.ran("decode")
    assert bool(emulator.ran("chunk")) == any(new > 1 for _, new in case.sequences)
    assert all(result.reports == [] for _, result in emulator.results)


def test_layers_of_one_pool_may_have_windows_of_their_own() -> None:
    case = Case(name="", sequences=((50, 1), (30, 9)), page_size=16)
    layers = [replace(case, window=window).layer for window in (None, 40, 21, 40)]
    specs = [replace(case.spec("fp4", "fp4"), layers=(layer,)) for layer in layers]
    beside = [
        residual_spec(replace(case, window=layer.window), spec, window=17, keep=0)
        for layer, spec in zip(layers, specs, strict=True)
    ]
    together = [replace(some[0], layers=tuple(spec.layers[0] for spec in some)) for some in (specs, beside)]
    alone = [Emulator().backend().create_residual_pool(*both) for both in zip(specs, beside, strict=True)]
    joint = Emulator().backend().create_residual_pool(*together)
    outs = [_attend(case, cache, 0) for cache in alone]
    for layer, out in enumerate(outs):
        np.testing.assert_array_equal(_attend(case, joint, layer), out)
    assert not np.array_equal(outs[1], outs[2])
    np.testing.assert_array_equal(outs[1], outs[3])


def _attend(case: Case, cache: PagedKVCache, layer: int) -> Any:
    rng = np.random.default_rng(2)
    first = 0
    tables = []
    for old, new in case.sequences:
        count = -(-(old + new) // case.page_size)
        tables.append(np.arange(first, first + count, dtype=np.int32))
        first += count
    for sequences in (tuple((0, old) for old, _ in case.sequences), case.sequences):
        step = build_metadata(sequences, tables, case.page_size)
        cache.begin_step(replace(step, groups=step.groups * 2))
        keys, values, queries = (
            mx.array(rng.standard_normal((step.num_tokens, heads, case.head_dim)).astype(np.float32))
            for heads in (case.kv_heads, case.kv_heads, case.kv_heads * case.group)
        )
        cache.write(layer, keys, values)
    return np.array(cache.attend(layer, queries, AttendOptions(scale=case.head_dim**-0.5)))


def test_less_than_a_page_cannot_be_kept() -> None:
    emulator = Emulator()
    with pytest.raises(ValueError, match="a multiple of the page size 32 for the Metal kernels, got 33"):
        watched_cache(emulator, emulator.backend(), SPLIT, ("fp4", "fp4"), window=1, keep=33)
