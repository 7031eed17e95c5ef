from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from attention_backends import BACKENDS, TestedBackend, poison
from attention_cases import (
    CASES,
    EVERY_FORMAT_PAIR,
    FORMAT_PAIRS,
    Case,
    as_numpy,
    build_metadata,
    run_case,
    shuffled_tables,
)
from octavo.kernels import FORMATS_WITH_KERNELS, page_format
from octavo.kernels.interface import AttendOptions, AttentionBackend, KVPool, LayerSpec, PoolSpec
from octavo.kernels.verify.oracle import OraclePool, sequence_slots

pytestmark = pytest.mark.parity

PAIR_IDS = ["-".join(pair) for pair in EVERY_FORMAT_PAIR]
EVERYTHING = next(case for case in CASES if case.name == "everything")


@pytest.fixture(params=BACKENDS, ids=lambda tested: tested.name)
def tested(request: pytest.FixtureRequest) -> TestedBackend:
    backend: TestedBackend = request.param
    return backend


@pytest.fixture
def backend(tested: TestedBackend) -> AttentionBackend:
    return tested.create()


def poisoned_pool(backend: AttentionBackend, spec: PoolSpec) -> KVPool:
    pool = backend.create_pool(spec)
    poison(pool)
    return pool


def _grid() -> Iterator[object]:
    for index, case in enumerate(CASES):
        for number, pair in enumerate(EVERY_FORMAT_PAIR):
            turns = 5 if pair in FORMAT_PAIRS else 16
            chosen = index % turns == number % turns or case is EVERYTHING
            if case.name == "mask-long":
                chosen = pair in (("bf16", "bf16"), ("fp4", "fp4"))
            if chosen and case.fits(*pair):
                yield pytest.param(case, pair, id=f"{case.name}-{'-'.join(pair)}")


@pytest.mark.parametrize(("case", "formats"), list(_grid()))
@pytest.mark.few(75)
def test_paged_equals_truth(
    case: Case, formats: tuple[str, str], tested: TestedBackend, backend: AttentionBackend
) -> None:
    outcome = run_case(case, poisoned_pool(backend, case.spec(*formats)))
    assert outcome.error < tested.tolerance


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("formats", EVERY_FORMAT_PAIR, ids=PAIR_IDS)
@pytest.mark.few(20)
def test_16_bit_activations_keep_their_dtype(
    dtype: mx.Dtype, formats: tuple[str, str], backend: AttentionBackend
) -> None:
    outcome = run_case(EVERYTHING, poisoned_pool(backend, EVERYTHING.spec(*formats)), dtype=dtype)
    assert outcome.error < 2e-2


@pytest.mark.parametrize("formats", EVERY_FORMAT_PAIR, ids=PAIR_IDS)
def test_many_layers_in_one_step(
    formats: tuple[str, str], tested: TestedBackend, backend: AttentionBackend
) -> None:
    rng = np.random.default_rng(5)
    specs = (
        LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64),
        LayerSpec(num_kv_heads=1, head_dim=64, value_dim=128, window=7),
        LayerSpec(num_kv_heads=4, head_dim=128, value_dim=64, window=9, keep=2),
    )
    pool = poisoned_pool(
        backend, PoolSpec(layers=specs, num_pages=12, page_size=8, k_format=formats[0], v_format=formats[1])
    )
    sequences = [(0, 30), (0, 5), (0, 1)]
    shape = Case(name="", sequences=tuple(sequences), page_size=8)
    metadata = build_metadata(sequences, shuffled_tables(shape, rng, 12), 8)
    pool.begin_step(metadata)
    tokens, outs, inputs = metadata.num_tokens, [], []
    for layer, spec in enumerate(specs):
        q = rng.standard_normal((tokens, 4, spec.head_dim)).astype(np.float32)
        k = rng.standard_normal((tokens, spec.num_kv_heads, spec.head_dim)).astype(np.float32)
        v = rng.standard_normal((tokens, spec.num_kv_heads, spec.value_dim)).astype(np.float32)
        pool.write(layer, mx.array(k), mx.array(v))
        outs.append(pool.attend(layer, mx.array(q), AttendOptions(scale=0.2)))
        inputs.append((q, k, v))
    mx.eval(outs, *pool.pending())
    for truth, out, (q, k, v) in zip(OraclePool(pool.spec).layers, outs, inputs, strict=True):
        truth.write(metadata, k, v)
        want = truth.attend(metadata, q, scale=0.2)
        assert np.abs(as_numpy(out) - want).max() / np.abs(want).max() < tested.tolerance


@pytest.mark.parametrize("formats", EVERY_FORMAT_PAIR, ids=PAIR_IDS)
def test_gather_returns_the_stored_rows(formats: tuple[str, str], backend: AttentionBackend) -> None:
    rng = np.random.default_rng(2)
    sequences = [(0, 9), (0, 4), (0, 16)]
    case = Case(name="", sequences=tuple(sequences), page_size=4, head_dim=64, value_dim=128)
    pool = poisoned_pool(backend, case.spec(*formats))
    metadata = build_metadata(sequences, shuffled_tables(case, rng, pool.spec.num_pages), 4)
    k, v = (rng.standard_normal((29, 2, dim)).astype(np.float32) for dim in (64, 128))
    pool.begin_step(metadata)
    pool.write(0, mx.array(k), mx.array(v))
    dense = pool.gather_sequences(0)
    mx.eval(*dense, *pool.pending())
    for array, rows, name in zip(dense, (k, v), formats, strict=True):
        fmt = page_format(name)
        got, want = np.array(array.astype(mx.float32)), fmt.restore(*fmt.store(rows)[:2])
        assert got.shape == (3, 2, 16, rows.shape[-1])
        for b, (_, length) in enumerate(sequences):
            mine = want[metadata.q_start[b] : metadata.q_start[b + 1]]
            np.testing.assert_allclose(got[b, :, :length], mine.swapaxes(0, 1), rtol=1e-2, atol=1e-6)
            assert not got[b, :, length:].any()


@pytest.mark.parametrize("formats", EVERY_FORMAT_PAIR, ids=PAIR_IDS)
def test_rows_with_nan_are_stored_as_zeros_and_reported(
    formats: tuple[str, str], backend: AttentionBackend
) -> None:
    case = Case(name="", sequences=((0, 6), (0, 3)), page_size=4, kv_heads=2, group=1, head_dim=64)
    rng = np.random.default_rng(3)
    pool = poisoned_pool(backend, case.spec(*formats))
    metadata = build_metadata(case.sequences, shuffled_tables(case, rng, pool.spec.num_pages), 4)
    q, k, v = (rng.standard_normal((9, 2, 64)).astype(np.float32) for _ in range(3))
    k[2, 1, 5], v[7, 0, 63], v[7, 1, 0] = np.nan, np.inf, -np.inf
    pool.begin_step(metadata)
    pool.write(0, mx.array(k), mx.array(v))
    out = pool.attend(0, mx.array(q), AttendOptions(scale=0.2))
    dense_k, dense_v = pool.gather_sequences(0)
    mx.eval(out, dense_k, dense_v, *pool.pending())
    assert pool.nonfinite_tokens() == [2, 7]
    assert np.isfinite(as_numpy(out)).all()
    assert not as_numpy(dense_k)[0, 1, 2].any()
    assert not as_numpy(dense_v)[1, :, 1].any()
    pool.begin_step(metadata)
    pool.write(0, mx.array(q), mx.array(q))
    mx.eval(*pool.pending())
    assert pool.nonfinite_tokens() == [], "a step reports its own rows only"


@pytest.mark.parametrize("formats", EVERY_FORMAT_PAIR, ids=PAIR_IDS)
def test_copied_pages_read_like_their_sources(formats: tuple[str, str], backend: AttentionBackend) -> None:
    case = Case(name="", sequences=((0, 8),), page_size=4, head_dim=64)
    pool = backend.create_pool(case.spec(*formats))
    table = np.array([2, 5], np.int32)
    metadata = build_metadata(case.sequences, [table], 4)
    rng = np.random.default_rng(4)
    k, v = (mx.array(rng.standard_normal((8, 2, 64)).astype(np.float32)) for _ in range(2))
    pool.begin_step(metadata)
    pool.write(0, k, v)
    before = [as_numpy(array) for array in pool.gather_sequences(0)]
    mx.eval(*pool.pending())
    pool.copy_pages([(2, 0), (5, 6), (0, 1)])  # the last source is a page that was just copied
    for first in (0, 1):
        pool.begin_step(build_metadata([(7, 1)], [np.array([first, 6], np.int32)], 4))
        for got, want in zip(pool.gather_sequences(0), before, strict=True):
            assert (as_numpy(got) == want).all()
    with pytest.raises(ValueError, match="7"):
        pool.copy_pages([(0, 7)])


@pytest.mark.parametrize("name", FORMATS_WITH_KERNELS)
def test_the_pool_takes_the_planned_bytes(name: str, backend: AttentionBackend) -> None:
    layer = LayerSpec(num_kv_heads=3, head_dim=128, value_dim=64)
    spec = PoolSpec(layers=(layer, layer), num_pages=7, page_size=16, k_format=name, v_format="bf16")
    one = page_format(name).page_bytes(128, page_size=16, num_kv_heads=3)
    assert spec.page_bytes == 2 * (one + 3 * 16 * 64 * 2)
    assert backend.create_pool(spec).nbytes == 7 * spec.page_bytes


def test_slots_follow_the_page_table() -> None:
    metadata = build_metadata([(5, 2)], [np.array([3, 0, 9], np.int32)], 3)
    assert sequence_slots(metadata, 0, 7).tolist() == [9, 10, 11, 0, 1, 2, 27]
    assert metadata.only_group().slots.tolist() == [2, 27]


def test_a_step_outside_the_pool_is_refused(backend: AttentionBackend) -> None:
    case = Case(name="", sequences=((0, 8),), page_size=4, head_dim=32)
    pool = backend.create_pool(case.spec("bf16", "bf16"))
    with pytest.raises(ValueError, match="slots"):
        pool.begin_step(build_metadata(case.sequences, [np.array([2, 7], np.int32)], 4))
    with pytest.raises(ValueError, match="page_size"):
        pool.begin_step(build_metadata(case.sequences, [np.array([2], np.int32)], 8))
