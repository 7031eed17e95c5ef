"""Self-test of a backend against float64 on a small grid, for `octavo doctor`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..formats import FORMAT_NAMES, page_format
from ..interface import AttendOptions, AttentionBackend, LayerSpec, PoolSpec
from ..metadata import AttentionMetadata, GroupMetadata
from ..residual import SIXTEEN_BITS
from .oracle import OraclePool, attend_residual


def attend_over_residual(
    backend: AttentionBackend, spec: PoolSpec, steps: Sequence[AttentionMetadata]
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Return the last step's output [T, 2 * Hkv, D], and the expected output.

    A query reads the first page of its sequence, and the page of its own position, in 16 bits. Raises
    ValueError if the backend refuses this.
    """
    layer, rng = spec.layers[0], np.random.default_rng(4)
    residual_layer = replace(layer, window=1, keep=spec.page_size)
    pool = backend.create_residual_pool(
        spec, replace(spec, layers=(residual_layer,), k_format="bf16", v_format="bf16")
    )
    layers = OraclePool(spec).layers[0], OraclePool(replace(spec, k_format="bf16", v_format="bf16")).layers[0]
    stored = (layers[0].keys, layers[0].values), (layers[1].keys, layers[1].values)
    out, want = np.zeros(0, np.float32), np.zeros(0)
    for pages in steps:
        residual = _residual_metadata(pages, spec.num_pages)
        step = replace(pages, groups=pages.groups + residual.groups)
        shape = (step.num_tokens, layer.num_kv_heads, layer.head_dim)
        queries = rng.standard_normal((shape[0], 2 * shape[1], shape[2])).astype(np.float32)
        rows = rng.standard_normal((2, *shape)).astype(np.float32)
        pool.begin_step(step)
        pool.write(0, mx.array(rows[0]), mx.array(rows[1]))
        attended = pool.attend(0, mx.array(queries), AttendOptions(scale=0.125))
        mx.eval(attended, *pool.pending())
        for metadata, parts in zip((pages, residual), stored, strict=True):
            for part, written in zip(parts, rows, strict=True):
                part.write(metadata.only_group().slots, written)
        out = np.array(attended)
        want = attend_residual(
            pages, residual, stored, queries, layer=layer, residual_layer=residual_layer, scale=0.125
        )
    return out, want


def _residual_metadata(pages: AttentionMetadata, num_pages: int) -> AttentionMetadata:
    num_slots, group = np.int32(num_pages * pages.page_size), pages.only_group()
    moved = GroupMetadata(
        slots=(group.slots + np.int32(pages.page_size)) % num_slots,
        page_table=(group.page_table + np.int32(1)) % np.int32(num_pages),
    )
    return replace(pages, groups=(moved,))


TOLERANCE = 0.02
"""Largest allowed error relative to the largest output; kernels may round queries and weights to bf16."""

_PAGE_SIZE = 16
_SEQUENCES = ((40, 1), (0, 21), (15, 4), (0, 1))


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """Result of one check; ``max_error`` is relative to the largest expected value."""

    name: str
    max_error: float
    ok: bool


@dataclass(frozen=True, slots=True)
class _Variant:
    name: str
    layer: LayerSpec
    sinks: bool = False
    softcap: float | None = None
    sequences: tuple[tuple[int, int], ...] = _SEQUENCES
    num_pages: int = 16


_VARIANTS = (
    _Variant("causal, head_dim 64", LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64)),
    _Variant("causal, head_dim 128", LayerSpec(num_kv_heads=1, head_dim=128, value_dim=128)),
    _Variant("causal, head_dim 96", LayerSpec(num_kv_heads=2, head_dim=96, value_dim=96)),
    _Variant(
        "window, kept positions, sinks, softcap",
        LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64, window=10, keep=2),
        sinks=True,
        softcap=5.0,
    ),
)
_LONG = _Variant(
    "635 positions",
    LayerSpec(num_kv_heads=1, head_dim=64, value_dim=64),
    sequences=((634, 1),),
    num_pages=40,
)


def run_selftest(backend: AttentionBackend) -> list[SelfTestResult]:
    """Check every page format: stored rows, attention, residual pages, and rows with NaN.

    A format that the backend refuses counts as passed.
    """
    results = []
    for name in FORMAT_NAMES:
        try:
            backend.create_pool(_pool_spec(name, _VARIANTS[0].layer))
        except ValueError as refusal:
            results.append(SelfTestResult(f"{name} is refused: {refusal}", 0.0, ok=True))
            continue
        for variant in (*_VARIANTS, _LONG):
            if not _holds(name, variant.layer):
                continue
            results += _attempt(f"{name}, {variant.name}", partial(_check, backend, name, variant))
        if name not in SIXTEEN_BITS:
            results += _attempt(f"{name} with 16-bit pages", partial(_check_residual, backend, name))
        results += _attempt(f"NaN is reported, {name}", partial(_check_nonfinite, backend, name))
    return results


def first_failure(backend: AttentionBackend) -> SelfTestResult | None:
    """Run a few checks that launch every kernel; return the first failure, or None if all pass."""
    for name, check in (
        ("fp4", partial(_check, backend, "fp4", _VARIANTS[-1])),
        ("bf16, long", partial(_check, backend, "bf16", _LONG)),
    ):
        for result in _attempt(name, check):
            if not result.ok:
                return result
    return None


def _holds(format_name: str, layer: LayerSpec) -> bool:
    try:
        page_format(format_name).row_bytes(layer.head_dim)
    except ValueError:
        return False
    return True


def _attempt(name: str, check: Callable[[], list[SelfTestResult]]) -> list[SelfTestResult]:
    try:
        return check()
    except RuntimeError as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        return [SelfTestResult(f"{name}: {why}", float("inf"), ok=False)]


def _check(backend: AttentionBackend, format_name: str, variant: _Variant) -> list[SelfTestResult]:
    rng = np.random.default_rng(1)
    pool = backend.create_pool(_pool_spec(format_name, variant.layer, variant.num_pages))
    truth = OraclePool(pool.spec).layers[0]
    heads = variant.layer.num_kv_heads
    sinks = rng.standard_normal(heads * 2).astype(np.float32) if variant.sinks else None
    read = 0.0
    for sequences in (tuple((0, old) for old, _ in variant.sequences), variant.sequences):
        metadata = _metadata(sequences, variant.num_pages)
        tokens = metadata.num_tokens
        keys, values = (
            rng.standard_normal((tokens, heads, dim)).astype(np.float32)
            for dim in (variant.layer.head_dim, variant.layer.value_dim)
        )
        pool.begin_step(metadata)
        pool.write(0, mx.array(keys), mx.array(values))
        dense = pool.gather_sequences(0)
        mx.eval(*dense, *pool.pending())
        truth.write(metadata, keys, values)
        read = max(_stored_error(dense, (keys, values), format_name, metadata), read)
    queries = rng.standard_normal((tokens, heads * 2, variant.layer.head_dim)).astype(np.float32)
    options = AttendOptions(
        scale=0.125, sinks=None if sinks is None else mx.array(sinks), softcap=variant.softcap
    )
    out = pool.attend(0, mx.array(queries), options)
    want = truth.attend(metadata, queries, scale=0.125, sinks=sinks, softcap=variant.softcap)
    name = f"{format_name}, {variant.name}"
    return [
        _result(f"write, {name}", read),
        _result(f"attend, {name}", _relative_error(np.array(out), want)),
    ]


def _check_residual(backend: AttentionBackend, format_name: str) -> list[SelfTestResult]:
    name = f"{format_name} with 16-bit pages"
    try:
        spec = _pool_spec(format_name, _VARIANTS[0].layer)
        steps = [_metadata(sequences) for sequences in ([(0, old) for old, _ in _SEQUENCES], _SEQUENCES)]
        got, want = attend_over_residual(backend, spec, steps)
    except ValueError as refusal:
        return [SelfTestResult(f"{name} is refused: {refusal}", 0.0, ok=True)]
    return [_result(f"attend, {name}", _relative_error(got, want))]


def _check_nonfinite(backend: AttentionBackend, format_name: str) -> list[SelfTestResult]:
    layer = LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64)
    pool = backend.create_pool(_pool_spec(format_name, layer))
    metadata = _metadata(((0, 3), (0, 2)))
    rows = np.random.default_rng(2).standard_normal((5, 2, 64)).astype(np.float32)
    spoilt = rows.copy()
    spoilt[3, 1, 17] = np.nan
    pool.begin_step(metadata)
    pool.write(0, mx.array(spoilt), mx.array(rows))
    out = pool.attend(0, mx.array(rows), AttendOptions(scale=0.125))
    mx.eval(out, *pool.pending())
    finite = bool(np.isfinite(np.array(out)).all())
    ok = finite and pool.nonfinite_tokens() == [3]
    return [SelfTestResult(f"NaN is reported, {format_name}", 0.0 if ok else float("inf"), ok)]


def _stored_error(
    dense: tuple[mx.array, mx.array],
    rows: tuple[NDArray[np.float32], NDArray[np.float32]],
    format_name: str,
    metadata: AttentionMetadata,
) -> float:
    fmt, errors = page_format(format_name), []
    for array, written in zip(dense, rows, strict=True):
        got = np.array(array)[metadata.row_sequences, :, metadata.positions]
        want = fmt.restore(*fmt.store(written)[:2])
        errors.append(_relative_error(got, want))
    return max(errors)


def _relative_error(got: NDArray[Any], want: NDArray[Any]) -> float:
    error = float(np.abs(got.astype(np.float64) - want).max() / np.abs(want).max())
    return error if np.isfinite(error) else float("inf")


def _result(name: str, error: float) -> SelfTestResult:
    return SelfTestResult(name, error, error < TOLERANCE)


def _pool_spec(format_name: str, layer: LayerSpec, num_pages: int = 16) -> PoolSpec:
    return PoolSpec(
        layers=(layer,),
        num_pages=num_pages,
        page_size=_PAGE_SIZE,
        k_format=format_name,
        v_format=format_name,
    )


def _metadata(sequences: Sequence[tuple[int, int]], num_pages: int = 16) -> AttentionMetadata:
    members = [(b, old, new) for b, (old, new) in enumerate(sequences) if new]
    pages = np.arange(num_pages, dtype=np.int32).reshape(len(sequences), -1)[:, ::-1]
    tables = pages[[b for b, _, _ in members]]
    return AttentionMetadata.of([(old, old + new) for _, old, new in members], tables, page_size=_PAGE_SIZE)
