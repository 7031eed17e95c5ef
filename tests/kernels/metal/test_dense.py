"""Long prompts through MLX's own attention: what our kernel makes of the pages, against float64 truth.

MLX's attention is the CPU's here. In 16 bits it rounds logits, which the GPU's does not: outputs are compared
in float32, and what the kernel makes for 16-bit queries bit by bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from attention_backends import poison
from attention_cases import Case, as_numpy, build_metadata
from metal_backend import Emulator, needs_compiler
from metal_cases import TOLERANCES, case_id, run_watched, shape
from metal_in_place import WritingDevice
from octavo.kernels.formats import FORMATS_WITH_KERNELS
from octavo.kernels.interface import AttendOptions, LayerSpec
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.metal import attention, dense
from octavo.kernels.metal.dense import dense_sequences, may_be_dense, plan_dense
from octavo.kernels.metal.in_place import InPlacePool
from octavo.kernels.metal.launch import KernelLibrary
from octavo.kernels.metal.plan import plan_chunks
from octavo.kernels.metal.pool import MetalPool

pytestmark = [pytest.mark.parity, pytest.mark.timeout(300)]
ROWS = 12
MIXED = ((37, 12), (20, 1), (0, 19), (5, 3), (70, 33), (0, 1))
"""Three prompts that go dense, one from its first position on, a short one, and rows that are decoded."""


def covering() -> Iterator[object]:
    """Every format, and groups of 1, 2 and 4, dims, page sizes and windows in turn; by default, of two
    formats one with either dim."""
    groups, pages = itertools.cycle((1, 2, 4)), itertools.cycle((16, 32, 8))
    windows = itertools.cycle(((None, 0), (24, 0), (24, 20), (9, 70), (500, 4)))
    for number, (name, dim) in enumerate(itertools.product(FORMATS_WITH_KERNELS, (64, 128))):
        window, keep = next(windows)
        sequences = MIXED if dim == 64 else ((21, 14), (0, 12))
        heads = 2 if dim == 64 else 1
        case = shape(
            f"w{window}k{keep}", dim, next(groups), next(pages), kv_heads=heads,
            sequences=sequences, window=window, keep=keep,
        )  # fmt: skip
        rare = number % 4 in (1, 2)
        yield pytest.param(case, name, id=f"{case.name}-{name}", marks=[pytest.mark.slow] if rare else [])


@needs_compiler
@pytest.mark.parametrize(("case", "name"), list(covering()))
def test_equals_truth(case: Case, name: str) -> None:
    outcome, emulator = run_watched(case, (name, name), mx.float32, dense_prompts=ROWS)
    assert outcome.error < TOLERANCES[mx.float32]
    assert len(emulator.ran("dense")) == 1
    assert len(emulator.ran("chunk")) == (case.sequences == MIXED)
    assert all(result.reports == [] for _, result in emulator.results)


@needs_compiler
def test_sinks_and_rows_that_leave_partial_octets() -> None:
    case = shape("", 80, 2, 16, sinks=True, window=40, keep=3, sequences=MIXED)
    outcome, _ = run_watched(case, ("int4", "fp5"), mx.float32, dense_prompts=ROWS)
    assert outcome.error < TOLERANCES[mx.float32]


@needs_compiler
def test_beside_a_short_prompt_alone() -> None:
    """The chunk kernel moves the rows of the dense one, and no others."""
    case = shape("", 64, 2, 16, sequences=((7, 20), (30, 3)))
    outcome, emulator = run_watched(case, ("fp4", "fp4"), mx.float32, dense_prompts=ROWS)
    assert outcome.error < TOLERANCES[mx.float32]
    assert (emulator.launches["dense"], emulator.launches["chunk"]) == (1, 1)


@needs_compiler
@pytest.mark.parametrize(
    "sequences", [((30, 1), (7, 20)), ((7, 20), (30, 1), (0, 15))], ids=["last", "first"]
)
def test_without_chunks_rows_go_back_to_their_places(sequences: tuple[tuple[int, int], ...]) -> None:
    case = shape("", 64, 2, 16, sequences=sequences)
    outcome, emulator = run_watched(case, ("fp4", "fp4"), mx.float32, dense_prompts=ROWS)
    assert outcome.error < TOLERANCES[mx.float32]
    assert emulator.launches["chunk"] == 0


@needs_compiler
@pytest.mark.parametrize(
    "case",
    [
        shape("softcap", 64, 2, 16, softcap=8.0, sequences=((0, 20),)),
        shape("dim", 96, 2, 16, kv_heads=1, sequences=((0, 20),)),
        shape("values", 128, 1, 16, kv_heads=1, value_dim=64, sequences=((0, 20),)),
        shape("short", 64, 2, 16, sequences=((30, 11),)),
    ],
    ids=case_id,
)
def test_what_cannot_be_dense_takes_the_chunk_kernel(case: Case) -> None:
    outcome, emulator = run_watched(case, ("fp4", "fp4"), mx.float16, dense_prompts=ROWS)
    assert outcome.error < TOLERANCES[mx.float16]
    assert (emulator.launches["dense"], emulator.launches["chunk"]) == (0, 1)


@needs_compiler
def test_off_by_default() -> None:
    _, emulator = run_watched(shape("", 64, 2, 16, sequences=((0, 130),)), ("fp4", "fp4"), mx.float16)
    assert (emulator.launches["dense"], emulator.launches["chunk"]) == (0, 1)


@needs_compiler
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=case_id)
@pytest.mark.parametrize("name", FORMATS_WITH_KERNELS)
def test_dense_rows_are_the_stored_ones_rounded_once(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: mx.Dtype
) -> None:
    made: list[tuple[mx.array, mx.array]] = []
    inner = dense.attend_densely

    def watched(plan, queries, arrays, **options):  # type: ignore[no-untyped-def]
        made.append(arrays)
        return inner(plan, queries, arrays, **options)

    monkeypatch.setattr(attention, "attend_densely", watched)
    case = shape("", 128, 1, 16, kv_heads=2, sequences=((0, 45),))
    pool = MetalPool(case.spec(name, name), Emulator().backend().library, ROWS)
    poison(pool)
    rng = np.random.default_rng(5)
    pool.begin_step(build_metadata(case.sequences, [np.array([2, 0, 3], np.int32)], 16))
    rows = [mx.array(rng.standard_normal((45, 2, 128)).astype(np.float32)).astype(dtype) for _ in range(3)]
    pool.write(0, *rows[1:])
    out = pool.attend(0, rows[0], AttendOptions(scale=0.1))
    assert out.dtype == dtype
    for got, want in zip(made[0], pool.gather_sequences(0), strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(as_numpy(got), as_numpy(want[0].swapaxes(0, 1)))


@needs_compiler
def test_pages_written_in_place() -> None:
    """test_in_flight.py has their order."""
    case = shape("", 64, 2, 16, sequences=((0, 30), (3, 1)))
    device = WritingDevice()
    pools = [InPlacePool(case.spec("fp4", "fp4"), KernelLibrary(device.compile), rows) for rows in (ROWS, 0)]
    tables = [np.array([2, 0, 3], np.int32), np.array([5], np.int32)]
    outs = []
    for pool in pools:
        rng = np.random.default_rng(6)
        for sequences in ([(0, 30), (0, 3)], [(30, 13), (3, 1)]):
            pool.begin_step(build_metadata(sequences, tables, 16))
            tokens = sum(new for _, new in sequences)
            q, k, v = (
                mx.array(rng.standard_normal((tokens, heads, 64)).astype(np.float32)) for heads in (4, 2, 2)
            )
            pool.write(0, k, v)
            outs.append(pool.attend(0, q, AttendOptions(scale=0.125)))
            assert pool.pending()
    mx.eval(outs)
    for got, want in zip(outs[:2], outs[2:], strict=True):
        assert np.abs(as_numpy(got) - as_numpy(want)).max() < 1e-5


@needs_compiler
def test_the_self_test_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Emulator()
    backend = device.backend()
    assert backend.dense_problem() is None
    assert len(device.ran("dense")) == 2
    attend = mx.fast.scaled_dot_product_attention

    def unmasked(q, k, v, *, scale, mask, sinks):  # type: ignore[no-untyped-def]
        return attend(q, k, v, scale=scale, mask=mask if mask == "causal" else None, sinks=sinks)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", unmasked)
    problem = backend.dense_problem()
    assert problem is not None
    assert "outputs differ from the kernel's by" in problem


def step(*sequences: tuple[int, int]) -> AttentionMetadata:
    tables = [np.arange(-(-(old + new) // 16), dtype=np.int32) for old, new in sequences]
    return build_metadata(sequences, tables, 16)


def test_which_sequences_are_dense() -> None:
    metadata = step((0, 64), (9, 1), (100, 63), (700, 64), (0, 200))
    assert dense_sequences(metadata, 64).tolist() == [0, 3, 4]
    assert dense_sequences(metadata, 201).tolist() == []
    assert dense_sequences(metadata, 0).tolist() == []
    assert dense_sequences(metadata, 1).tolist() == [0, 2, 3, 4], "decoded rows never are"


def test_runs_skip_what_no_row_sees() -> None:
    plan = plan_dense(step((9, 1), (100, 20)), np.array([1], np.int32), 30, 4)
    assert plan is not None
    # Kept 0..3, then from 100 - 29 on.
    assert plan.runs.tolist() == [[0, 4, 1, 0], [4, 32, 1, 71], [36, 17, 1, 103]]
    assert plan.rows.tolist() == list(range(1, 21))
    assert plan.num_keys == 53
    (member,) = plan.members
    keys = np.r_[0:4, 71:120]
    rows = np.arange(100, 120)[:, None]
    assert (np.array(member.mask) == ((keys <= rows) & ((keys > rows - 30) | (keys < 4)))).all()


def test_a_window_that_hides_nothing_needs_no_mask() -> None:
    plan = plan_dense(step((100, 20)), np.array([0], np.int32), 120, 4)
    assert plan is not None
    assert plan.members[0].mask == "causal"
    assert plan.num_keys == 120


def test_rows_beside_chunks_are_moved_after_those_decoded() -> None:
    metadata = step((0, 2), (9, 1), (4, 2), (3, 1))
    tiles = plan_chunks(metadata, 8, np.array([0, 1], np.int32))
    assert tiles[0].tolist() == [3, 2, 2, 1]
    assert tiles[1:].tolist() == [[0, 0, 0, 2], [1, 0, 0, 5], [2, 0, 0, 0], [3, 0, 0, 1]]


def test_layers_that_may_be_dense() -> None:
    assert may_be_dense(LayerSpec(num_kv_heads=1, head_dim=128, value_dim=128))
    assert not may_be_dense(LayerSpec(num_kv_heads=1, head_dim=256, value_dim=256))
    assert not may_be_dense(LayerSpec(num_kv_heads=1, head_dim=128, value_dim=64))
    assert not may_be_dense(LayerSpec(num_kv_heads=1, head_dim=64, value_dim=64, window=8, chunked=True))
