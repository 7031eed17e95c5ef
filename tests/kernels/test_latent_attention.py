"""Attention over latents and rotary keys in pages, against float64 on what the pages hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from attention_backends import BACKENDS, TestedBackend, poison
from native import at_every_level, require_extension, run_at_level
from octavo.kernels.interface import AttendOptions, KVPool, LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata

pytestmark = pytest.mark.parity

Floats = NDArray[np.float32]
CAN = [backend for backend in BACKENDS if backend.name in ("reference", "cpu")]
LIMITS = {"bf16": 0.01, "fp16": 0.01, "int8": 0.02, "fp4": 0.03, "fp5": 0.03}
"""Relative errors of a row: of bf16 queries and results, and of 8-bit arithmetic over 4-bit pages."""


@dataclass(frozen=True)
class Case:
    """``sequences``: positions before the last step, rows of the last step."""

    sequences: tuple[tuple[int, int], ...]
    page_size: int = 16
    num_heads: int = 4
    latent: int = 64
    rotary: int = 16
    window: int | None = None

    @property
    def layer(self) -> LayerSpec:
        return LayerSpec(num_kv_heads=1, head_dim=self.latent, value_dim=self.rotary, window=self.window)


CASES = {
    "decode": Case(((0, 1), (15, 1), (16, 1), (70, 1))),
    "mixed": Case(((0, 5), (33, 1), (20, 18))),
    "small pages": Case(((0, 5), (9, 1), (13, 6)), page_size=4),
    "long": Case(((2100, 1), (1500, 3))),
    "many heads": Case(((40, 1), (0, 9)), num_heads=48, latent=512, rotary=64),
    "odd dims": Case(((40, 1), (0, 9)), num_heads=6, latent=40, rotary=8, page_size=8),
    "uneven tiles": Case(((40, 1), (17, 9), (90, 1)), num_heads=20, latent=96, rotary=32),
    "window": Case(((40, 1), (0, 30)), window=12),
}


def metadata(case: Case, work: list[tuple[int, int, int]]) -> AttentionMetadata:
    """Of (sequence, start, stop); pages in the reverse order."""
    size = case.page_size
    width = max(-(-(old + new) // size) for old, new in case.sequences)
    count = len(case.sequences)
    tables = np.arange(1, count * width + 1, dtype=np.int32)[::-1].reshape(count, width)
    positions = np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in work])
    owners = np.concatenate([np.full(b - a, i) for i, a, b in work])
    slots = (tables[owners, positions // size] * size + positions % size).astype(np.int32)
    chosen = np.ascontiguousarray(tables[[i for i, _, _ in work]])
    return AttentionMetadata(
        positions=positions,
        q_start=np.cumsum([0, *(b - a for _, a, b in work)]).astype(np.int32),
        kv_len=np.array([b for *_, b in work], np.int32),
        groups=(GroupMetadata(slots=slots, page_table=chosen),),
        page_size=size,
    )


class Data:
    """Random latents, rotary keys and queries of every position of every sequence."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(7)
        self.case = case
        lengths = [old + new for old, new in case.sequences]

        def normal(*shape: int) -> list[Floats]:
            return [rng.standard_normal((length, *shape)).astype(np.float32) for length in lengths]

        self.latents, self.rotary = normal(1, case.latent), normal(1, case.rotary)
        self.queries, self.rotary_queries = (
            normal(case.num_heads, case.latent),
            normal(case.num_heads, case.rotary),
        )
        self.scale = (case.latent + case.rotary) ** -0.5

    def rows(self, parts: list[Floats], work: list[tuple[int, int, int]], dtype: mx.Dtype) -> mx.array:
        return mx.array(np.concatenate([parts[i][a:b] for i, a, b in work])).astype(dtype)

    def step(self, pool: KVPool, work: list[tuple[int, int, int]], dtype: mx.Dtype = mx.bfloat16) -> Floats:
        """Write and attend; rows [T, Hq, R]."""
        pool.begin_step(metadata(self.case, work))
        pool.write(0, self.rows(self.latents, work, dtype), self.rows(self.rotary, work, dtype))
        rotary = self.rows(self.rotary_queries, work, mx.float32) * self.scale
        options = AttendOptions(scale=self.scale, rotary=rotary.astype(dtype))
        out = pool.attend(0, self.rows(self.queries, work, dtype), options)
        mx.eval(out, *pool.pending())
        return np.array(out.astype(mx.float32))

    def truth(self, pool: KVPool, work: list[tuple[int, int, int]]) -> NDArray[np.float64]:
        """Of a step that has been computed, from the rows that its pages hold."""
        latents, keys = (np.array(x.astype(mx.float32), np.float64) for x in pool.gather_sequences(0))
        out = []
        for b, (i, start, stop) in enumerate(work):
            for p in range(start, stop):
                first = 0 if self.case.window is None else max(0, p + 1 - self.case.window)
                seen = slice(first, p + 1)
                logits = (
                    self.queries[i][p] @ latents[b, 0, seen].T
                    + self.rotary_queries[i][p] @ keys[b, 0, seen].T
                )
                weights = np.exp((logits - logits.max(-1, keepdims=True)) * self.scale)
                out.append(weights @ latents[b, 0, seen] / weights.sum(-1, keepdims=True))
        return np.array(out)


def pool_of(backend: TestedBackend, case: Case, k_format: str = "bf16", v_format: str = "bf16") -> KVPool:
    width = max(-(-(old + new) // case.page_size) for old, new in case.sequences)
    spec = PoolSpec(
        layers=(case.layer,),
        num_pages=1 + width * len(case.sequences),
        page_size=case.page_size,
        k_format=k_format,
        v_format=v_format,
    )
    pool = backend.create().create_pool(spec)
    if (k_format, v_format) == ("bf16", "bf16"):  # what nobody has written is NaN
        poison(pool)
    return pool


def history(case: Case) -> list[tuple[int, int, int]]:
    return [(i, 0, old) for i, (old, _) in enumerate(case.sequences) if old]


def last_step(case: Case) -> list[tuple[int, int, int]]:
    return [(i, old, old + new) for i, (old, new) in enumerate(case.sequences)]


@pytest.mark.parametrize(
    "formats",
    [("bf16", "bf16"), ("fp16", "fp16"), ("int8", "int8"), ("fp4", "bf16"), ("fp5", "fp4")],
    ids="/".join,
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", CAN, ids=lambda backend: backend.name)
def test_latents_equal_truth(backend: TestedBackend, name: str, formats: tuple[str, str]) -> None:
    error = largest_error(backend, CASES[name], formats)
    assert error < LIMITS[formats[0]] + LIMITS[formats[1]], error


def largest_error(backend: TestedBackend, case: Case, formats: tuple[str, str]) -> float:
    """Of a row, relative."""
    data, pool = Data(case), pool_of(backend, case, *formats)
    data.step(pool, history(case))
    got = data.step(pool, last_step(case))
    wanted = data.truth(pool, last_step(case))
    return float(np.sqrt(((got - wanted) ** 2).mean(-1) / (wanted**2).mean(-1)).max())


AT_LEVEL = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_latent_attention as tests
from octavo.kernels import _ext
backend = tests.BACKENDS[-1]
print(_ext.isa(), *(tests.largest_error(backend, case, ("bf16", "bf16")) for case in tests.CASES.values()))
"""


@at_every_level
def test_every_instruction_set_equals_truth(level: str) -> None:
    require_extension()
    name, *errors = run_at_level(level, AT_LEVEL).split()
    assert name == level
    assert len(errors) == len(CASES)
    assert all(float(error) < 2 * LIMITS["bf16"] for error in errors), errors  # NaN is not


@pytest.mark.parametrize("name", ["many heads", "long"])
@pytest.mark.parametrize("formats", [("bf16", "bf16"), ("int8", "bf16")], ids="/".join)
def test_no_bit_depends_on_how_heads_are_shared_out(name: str, formats: tuple[str, str]) -> None:
    """The more threads, the fewer heads an item has."""
    ext = require_extension()
    case = CASES[name]
    backend = next(chosen for chosen in BACKENDS if chosen.name == "cpu")
    data, pool = Data(case), pool_of(backend, case, *formats)
    data.step(pool, history(case))
    before, rows = ext.threads(), []
    try:
        for threads in (1, 3, 16):
            ext.set_threads(threads)
            rows.append(data.step(pool, last_step(case)))
    finally:
        ext.set_threads(before)
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


@pytest.mark.parametrize("name", ["mixed", "many heads", "small pages"])
@pytest.mark.parametrize("formats", [("bf16", "bf16"), ("fp4", "bf16")], ids="/".join)
def test_a_row_has_the_same_bits_alone(name: str, formats: tuple[str, str]) -> None:
    backend = next(chosen for chosen in BACKENDS if chosen.name == "cpu")
    case = CASES[name]
    data, pool = Data(case), pool_of(backend, case, *formats)
    data.step(pool, history(case))
    together = data.step(pool, last_step(case))
    first = 0
    for i, old, stop in last_step(case):
        for p in range(old, stop):
            alone = data.step(pool, [(i, p, p + 1)])
            assert np.array_equal(alone[0], together[first]), (i, p)
            first += 1


@pytest.mark.parametrize("backend", CAN, ids=lambda backend: backend.name)
def test_what_no_latent_layer_is_is_refused(backend: TestedBackend) -> None:
    layer = LayerSpec(num_kv_heads=2, head_dim=16, value_dim=8)
    pool = backend.create().create_pool(
        PoolSpec(layers=(layer,), num_pages=2, page_size=16, k_format="bf16", v_format="bf16")
    )
    pool.begin_step(metadata(Case(((0, 1),)), [(0, 0, 1)]))
    pool.write(0, mx.zeros((1, 2, 16)), mx.zeros((1, 2, 8)))
    with pytest.raises(ValueError, match="one KV head"):
        pool.attend(0, mx.zeros((1, 4, 16)), AttendOptions(scale=1.0, rotary=mx.zeros((1, 4, 8))))
