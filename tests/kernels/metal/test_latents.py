"""The Metal kernel for latents (MLA), executed from its source, against float64.

The pool is poisoned with NaN, so wrong reads fail."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from latent_cases import (
    CASES,
    MLA,
    Case,
    Data,
    history,
    last_step,
    metadata,
    relative_errors,
    residual_pool,
    residual_truth,
    spec_of,
)
from metal_backend import Emulator, needs_compiler
from metal_checks import check_bytes, pages_read
from metal_emulator import FAST_MATH
from metal_latents import LATENT_LIMIT, run_latents, worst_latents
from octavo.kernels import page_format
from octavo.kernels.interface import AttendOptions, LayerSpec, PoolSpec
from octavo.kernels.metal.units import METAL_FORMATS
from octavo.kernels.residual_cache import ResidualCache

pytestmark = [pytest.mark.parity, needs_compiler, pytest.mark.timeout(300)]
SIXTEEN = {mx.float16: 1e-3, mx.bfloat16: 8e-3}
SHORT = [name for name in CASES if name not in ("long", "many heads")]
ALIKE = Case(((140, 1), (20, 1), (0, 11)), num_heads=6)


@pytest.mark.parametrize(
    ("name", "formats"), list(zip(SHORT, itertools.cycle([("bf16", "bf16"), ("fp5", "fp4")]), strict=False))
)
@pytest.mark.few(5)
def test_equals_truth(name: str, formats: tuple[str, str]) -> None:
    assert worst_latents(CASES[name], formats) < LATENT_LIMIT


@pytest.mark.parametrize("name", METAL_FORMATS)
@pytest.mark.few(4)
def test_every_format_equals_truth(name: str) -> None:
    assert worst_latents(MLA, (name, name)) < LATENT_LIMIT


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_16_bit_queries(dtype: mx.Dtype) -> None:
    assert worst_latents(ALIKE, ("fp4", "bf16"), dtype=dtype) < SIXTEEN[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["long", "many heads"])
def test_long_rows_and_many_heads(name: str) -> None:
    assert worst_latents(CASES[name], ("fp4", "bf16")) < LATENT_LIMIT


def test_every_schedule_gives_bit_identical_results() -> None:
    outs = [
        run_latents(ALIKE, ("fp4", "bf16"), emulator=Emulator(seed=seed, schedule=schedule)).got
        for seed, schedule in ((0, "inorder"), (1, "random"), (2, "greedy"), (3, "reverse"), (4, "mixed"))
    ]
    assert all((out == outs[0]).all() for out in outs)


def test_fast_math_changes_little() -> None:
    assert worst_latents(ALIKE, ("fp4", "bf16"), emulator=Emulator(extra_flags=FAST_MATH)) < LATENT_LIMIT


def test_a_row_has_bit_identical_results_in_any_batch_and_chunk() -> None:
    case = CASES["mixed"]
    ran = run_latents(case, ("fp4", "bf16"))
    first = 0
    for i, old, stop in last_step(case):
        for p in (old, stop - 1):
            alone = ran.data.step(ran.pool, [(i, p, p + 1)], mx.float32)
            np.testing.assert_array_equal(alone[0], ran.got[first + p - old])
        first += stop - old


def test_a_split_row_has_bit_identical_results_in_any_batch() -> None:
    ran = run_latents(ALIKE, ("fp4", "bf16"))
    for i, row in ((0, 0), (1, 1)):
        work = [last_step(ALIKE)[i]]
        np.testing.assert_array_equal(ran.data.step(ran.pool, work, mx.float32)[0], ran.got[row])


@pytest.mark.parametrize("name", ["mixed", "uneven tiles", "window of pages"])
def test_latents_of_two_kinds_of_pages(name: str) -> None:
    case = CASES[name]
    pool = residual_pool(
        Emulator().backend(), case, "fp4", "bf16", window=case.page_size + 1, keep=case.page_size
    )
    assert isinstance(pool, ResidualCache)
    data = Data(case)
    data.write(pool, history(case), mx.float32)
    got = data.step(pool, last_step(case), mx.float32)
    assert relative_errors(got, residual_truth(data, pool, last_step(case))).max() < LATENT_LIMIT


def test_sinks_join_the_logits() -> None:
    """A sink far above every logit gives zeros; a sink far below changes no bit."""
    case = CASES["mixed"]
    ran = run_latents(case, ("bf16", "bf16"))
    queries = ran.data.rows(ran.data.queries, last_step(case), mx.float32)
    rotary = ran.data.rows(ran.data.rotary_queries, last_step(case), mx.float32) * ran.data.scale
    sinks = mx.array([-100.0, 100.0, -100.0, -100.0])
    options = AttendOptions(scale=ran.data.scale, rotary=rotary, sinks=sinks)
    got = np.array(ran.pool.attend(0, queries, options))
    assert np.abs(got[:, 1]).max() < 1e-6
    np.testing.assert_array_equal(got[:, (0, 2, 3)], ran.got[:, (0, 2, 3)])


def test_latents_are_read_once_for_a_tile_of_heads() -> None:
    case = Case(((100, 1),), num_heads=20, latent=512, rotary=64)
    ran = run_latents(case, ("fp4", "bf16"))
    (launch,) = ran.emulator.ran("latent")
    row = page_format("fp4").row_bytes(512) + page_format("bf16").row_bytes(64)
    codes = pages_read(launch, "k_codes", "v_codes")
    assert pages_read(launch).unique_bytes == 101 * row
    assert codes.bytes == codes.unique_bytes
    assert launch.stats.threadgroup_bytes <= 28672


@pytest.mark.parametrize("name", METAL_FORMATS)
@pytest.mark.few(4)
def test_rows_of_latents_are_bit_equal(name: str) -> None:
    check_bytes(name, 512, Emulator(ftz=False), limit=300, value_dim=64)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            LayerSpec(num_kv_heads=2, head_dim=512, value_dim=64),
            "head_dim must be a multiple of 8 from 8 to 256",
        ),
        (
            LayerSpec(num_kv_heads=1, head_dim=520, value_dim=64),
            "head_dim must be a multiple of 8 from 8 to 256",
        ),
        (LayerSpec(num_kv_heads=1, head_dim=512, value_dim=512), "must be a multiple of 8 from 8 to 256"),
    ],
)
def test_wide_rows_that_are_no_latents_are_refused(layer: LayerSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Emulator().backend().create_pool(
            PoolSpec(layers=(layer,), num_pages=2, page_size=16, k_format="bf16", v_format="bf16")
        )


def test_specs_that_latents_cannot_have_are_refused() -> None:
    case = CASES["decode"]
    pool = Emulator().backend().create_pool(spec_of(case))
    pool.begin_step(metadata(case, last_step(case)))
    queries, rotary = mx.zeros((4, 4, 64)), mx.zeros((4, 4, 16))
    for bad, options, message in (
        (queries, AttendOptions(scale=1.0, rotary=rotary, softcap=1.0), "no softcap"),
        (queries, AttendOptions(scale=1.0, rotary=rotary[..., :8]), "rotary queries must be"),
        (queries[:3], AttendOptions(scale=1.0, rotary=rotary[:3]), "queries must be"),
        (queries, AttendOptions(scale=1.0, rotary=rotary, mask=mx.zeros((4, 71))), "with mask"),
    ):
        with pytest.raises(ValueError, match=message):
            pool.attend(0, bad, options)
