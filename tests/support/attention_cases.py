"""Shapes for tests of paged attention, and a run of one case against a float64 reference.

Pools are larger than the tables, page IDs are shuffled, and unowned rows are NaN.
Earlier positions are written in earlier steps, so the last step is a mixed batch over existing pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from format_rows import holds
from octavo.kernels.interface import AttendOptions, KVPool, LayerSpec, PoolSpec
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata
from octavo.kernels.verify.oracle import OraclePool

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``sequences``: (positions before the last step, rows of the last step)."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    page_size: int = 16
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    window: int | None = None
    keep: int = 0
    sinks: bool = False
    softcap: float | None = None
    whole: tuple[int, int] = (0, 0)
    mask: str = ""

    @property
    def layer(self) -> LayerSpec:
        return LayerSpec(
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim or self.head_dim,
            window=self.window,
            keep=self.keep,
        )

    def fits(self, k_format: str, v_format: str) -> bool:
        return holds(k_format, self.layer.head_dim) and holds(v_format, self.layer.value_dim)

    def spec(self, k_format: str, v_format: str) -> PoolSpec:
        pages = sum(-(-(old + new) // self.page_size) for old, new in self.sequences)
        return PoolSpec(
            layers=(self.layer,),
            num_pages=pages + 5,
            page_size=self.page_size,
            k_format=k_format,
            v_format=v_format,
        )


def _grid() -> Iterator[Case]:
    for page_size in (1, 2, 4, 8, 16, 32, 64):
        edges = sorted({1, max(page_size - 1, 1), page_size, page_size + 1, 2 * page_size, 2 * page_size + 1})
        yield Case(
            name=f"decode-page{page_size}",
            page_size=page_size,
            sequences=tuple((length - 1, 1) for length in edges),
        )
        yield Case(
            name=f"mixed-page{page_size}",
            page_size=page_size,
            sequences=((0, 1), (page_size, 1), (0, page_size + 1), (page_size - 1, 2), (3 * page_size, 7)),
        )
    for group in (1, 2, 3, 4, 5, 8):
        yield Case(name=f"group{group}", group=group, sequences=((33, 1), (0, 18), (16, 1), (5, 20)))
    for head_dim in (32, 40, 64, 80, 96, 112, 128, 192, 256):
        yield Case(name=f"dim{head_dim}", head_dim=head_dim, sequences=((47, 1), (0, 19), (20, 9)))
    yield Case(name="value-narrower", head_dim=128, value_dim=64, sequences=((17, 1), (0, 20), (15, 3)))
    yield Case(name="value-wider", head_dim=64, value_dim=128, sequences=((17, 1), (0, 20), (15, 3)))
    yield Case(name="value-odd", head_dim=192, value_dim=96, kv_heads=1, sequences=((17, 1), (0, 20)))
    yield Case(name="one-head", kv_heads=1, group=8, sequences=((63, 1), (31, 2)))
    yield Case(name="many-heads", kv_heads=8, group=1, sequences=((63, 1), (31, 2)))
    yield Case(name="one-token", sequences=((0, 1),))
    yield Case(name="one-chunk", sequences=((0, 70),))
    yield Case(name="long-decode", page_size=32, sequences=((700, 1), (3, 1)))
    yield Case(name="chunk-over-long", page_size=32, sequences=((300, 40),))
    for window in (1, 5, 16, 17, 40):
        yield Case(name=f"window{window}", window=window, sequences=((50, 1), (0, 45), (30, 9), (0, 1)))
    for keep in (1, 4, 16, 20):
        yield Case(name=f"keep{keep}", window=8, keep=keep, sequences=((50, 1), (0, 45), (30, 9), (2, 1)))
    yield Case(name="sinks", sinks=True, group=4, sequences=((40, 1), (0, 21), (10, 5)))
    yield Case(name="sinks-window", sinks=True, window=9, keep=2, sequences=((40, 1), (0, 21), (10, 5)))
    yield Case(name="softcap", softcap=5.0, sequences=((40, 1), (0, 21), (10, 5)))
    yield Case(
        name="everything",
        softcap=8.0,
        sinks=True,
        window=20,
        keep=3,
        group=3,
        page_size=8,
        sequences=((90, 1), (0, 33), (25, 17), (0, 1)),
    )

    ragged = ((90, 1), (0, 33), (25, 17), (0, 1), (70, 2))
    for mask in ("seen", "seen per head", "added", "added per head"):
        yield Case(name=f"mask-{mask}", mask=mask, page_size=8, group=3, sequences=ragged)
        yield Case(
            name=f"mask-{mask}-everything",
            mask=mask,
            softcap=8.0,
            sinks=True,
            window=20,
            keep=3,
            sequences=ragged,
        )
    images = ((40, 1), (0, 45), (30, 20), (5, 2), (0, 40))
    yield Case(name="whole", whole=(3, 19), page_size=8, sequences=images)
    yield Case(name="whole-window", whole=(2, 18), window=20, keep=3, softcap=8.0, sequences=images)
    yield Case(name="mask-long", mask="seen", page_size=32, sequences=((1300, 1), (200, 90)))


CASES = tuple(_grid())

FORMAT_PAIRS = (("bf16", "bf16"), ("fp16", "fp16"), ("fp4", "fp4"), ("bf16", "fp4"), ("fp4", "fp16"))
"""(K, V): pairs with kernels on every backend."""

EVERY_FORMAT_PAIR = (
    *FORMAT_PAIRS,
    ("int8", "int8"), ("int4", "int4"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"),
    ("affine8", "affine8"), ("affine4", "affine4"), ("int8", "fp4"), ("nvfp4", "int4"),
    ("fp5", "fp4"), ("fp5", "fp5"),
)  # fmt: skip


def build_metadata(
    sequences: Sequence[tuple[int, int]], tables: Sequence[NDArray[np.int32]], page_size: int
) -> AttentionMetadata:
    """Return the step that writes rows old to old + new of each sequence."""
    members = [(old, new, table) for (old, new), table in zip(sequences, tables, strict=True) if new]
    width = max(-(-(old + new) // page_size) for old, new, _ in members)
    page_table = np.zeros((len(members), width), np.int32)
    positions, slots = [], []
    for b, (old, new, table) in enumerate(members):
        used = -(-(old + new) // page_size)
        page_table[b, :used] = table[:used]
        at = np.arange(old, old + new, dtype=np.int32)
        positions.append(at)
        slots.append(table[at // page_size] * page_size + at % page_size)
    counts = [new for _, new, _ in members]
    return AttentionMetadata(
        positions=np.concatenate(positions),
        q_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        kv_len=np.array([old + new for old, new, _ in members], np.int32),
        groups=(GroupMetadata(slots=np.concatenate(slots).astype(np.int32), page_table=page_table),),
        page_size=page_size,
    )


def with_whole(case: Case, step: AttentionMetadata) -> AttentionMetadata:
    last, (first, stop) = step.positions.copy(), case.whole
    for begin, count in zip(step.q_start[:-1], np.diff(step.q_start), strict=True):
        if first < stop <= count:
            last[begin + first : begin + stop] = step.positions[begin + stop - 1]
    return replace(step, last=last) if stop else step


def with_table(step: AttentionMetadata, page_table: NDArray[np.int32]) -> AttentionMetadata:
    return replace(step, groups=(step.only_group()._replace(page_table=page_table),))


def shuffled_tables(case: Case, rng: np.random.Generator, num_pages: int) -> list[NDArray[np.int32]]:
    pages = rng.permutation(num_pages).astype(np.int32)
    tables, start = [], 0
    for old, new in case.sequences:
        count = -(-(old + new) // case.page_size)
        tables.append(pages[start : start + count])
        start += count
    return tables


@dataclass(frozen=True, slots=True)
class Extras:
    softcap: float | None
    sinks: Floats | None
    mask: NDArray[np.bool_] | Floats | None
    whole: NDArray[np.bool_] | None

    @classmethod
    def of(cls, case: Case, rng: np.random.Generator, metadata: AttentionMetadata) -> Extras:
        heads = case.kv_heads * case.group
        return cls(
            softcap=case.softcap,
            sinks=rng.standard_normal(heads).astype(np.float32) if case.sinks else None,
            mask=_mask(case, rng, metadata),
            whole=whole_mask(case, metadata),
        )

    def truth(self) -> dict[str, Any]:
        mask = self.mask if self.whole is None else self.whole
        return {"softcap": self.softcap, "sinks": self.sinks, "mask": mask}

    def arrays(self) -> dict[str, Any]:
        mask = None if self.mask is None else mx.array(self.mask)
        return {
            "softcap": self.softcap,
            "sinks": None if self.sinks is None else mx.array(self.sinks),
            "mask": mask[:, 0] if mask is not None and mask.shape[1] == 1 else mask,
        }


def whole_mask(case: Case, metadata: AttentionMetadata) -> NDArray[np.bool_] | None:
    """Return visible positions [T, 1, L] if some rows see later ones; otherwise None."""
    if metadata.last is None:
        return None
    at, seen = metadata.positions[:, None], np.arange(metadata.kv_len.max())
    window = case.window or len(seen)
    return ((seen <= metadata.last[:, None]) & ((seen > at - window) | (seen < case.keep)))[:, None]


def _mask(
    case: Case, rng: np.random.Generator, metadata: AttentionMetadata
) -> NDArray[np.bool_] | Floats | None:
    """Return a mask with a row that sees nothing, a row that sees all, and tiles that no row sees."""
    if not case.mask:
        return None
    heads = case.kv_heads * case.group if case.mask.endswith("per head") else 1
    shape = (metadata.num_tokens, heads, int(metadata.kv_len.max()))
    seen = rng.random(shape) < 0.4
    seen[:, :, 100:300] = False
    seen[-1], seen[0] = False, True
    if case.mask.startswith("seen"):
        return seen
    hidden = rng.choice([-np.inf, -1e30], shape)
    return np.where(seen, rng.standard_normal(shape), hidden).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outputs of the backend and of the reference for the last step, [T, Hq, Dv]."""

    got: NDArray[np.float64]
    want: NDArray[np.float64]

    @property
    def error(self) -> float:
        return float(np.abs(self.got - self.want).max() / np.abs(self.want).max())


def run_case(case: Case, pool: KVPool, *, dtype: mx.Dtype = mx.float32, seed: int = 0) -> Outcome:
    """Write the case's K and V through ``pool`` in two steps and attend in the second.

    Inputs are rounded to ``dtype`` first. In a poisoned pool, reads of unowned rows give NaN."""
    spec, rng = pool.spec, np.random.default_rng(seed)
    truth = OraclePool(spec).layers[0]
    tables = shuffled_tables(case, rng, spec.num_pages)
    scale = case.head_dim**-0.5
    outcome: Outcome | None = None
    for sequences in ([(0, old) for old, _ in case.sequences], case.sequences):
        if not any(new for _, new in sequences):
            continue
        metadata = build_metadata(sequences, tables, case.page_size)
        if sequences is case.sequences:
            metadata = with_whole(case, metadata)
        tokens = metadata.num_tokens
        queries = _random(rng, (tokens, case.kv_heads * case.group, case.head_dim), dtype)
        keys = _random(rng, (tokens, case.kv_heads, case.head_dim), dtype)
        values = _random(rng, (tokens, case.kv_heads, case.layer.value_dim), dtype)
        pool.begin_step(metadata)
        pool.write(0, keys, values)
        extras = Extras.of(case, rng, metadata)
        out = pool.attend(0, queries, AttendOptions(scale=scale, **extras.arrays()))
        mx.eval(out, *pool.pending())
        assert pool.nonfinite_tokens() == []
        assert out.dtype == dtype
        truth.write(metadata, as_numpy(keys), as_numpy(values))
        want = truth.attend(metadata, as_numpy(queries), scale=scale, **extras.truth())
        outcome = Outcome(as_numpy(out).astype(np.float64), want)
    assert outcome is not None
    return outcome


def as_numpy(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32))


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return Gaussian rows with one channel eight times as large, as keys of real models have."""
    rows = rng.standard_normal(shape).astype(np.float32)
    rows[..., 3] *= 8
    return mx.array(rows).astype(dtype)
