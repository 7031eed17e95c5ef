from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from octavo.kernels import FORMAT_NAMES
from octavo.kernels.interface import AttendOptions, PoolSpec
from octavo.kernels.reference.backend import ReferenceBackend, ReferencePool
from octavo.kernels.verify.selftest import run_selftest


def test_the_reference_passes_the_selftest() -> None:
    results = run_selftest(ReferenceBackend())
    assert len(results) == 12 * len(FORMAT_NAMES) - 2 * 2 - 2, (
        "affine: no rows of 96; 16 bits: no residual pages"
    )
    assert all(result.ok for result in results), results


class _Blind(ReferencePool):
    def nonfinite_tokens(self) -> list[int]:
        return []

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        return super().attend(layer, queries, replace(options, softcap=None))

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        del pairs


class _BlindBackend(ReferenceBackend):
    def create_pool(self, spec: PoolSpec) -> ReferencePool:
        return _Blind(spec)


def test_the_selftest_catches_a_broken_backend() -> None:
    failed = [result.name for result in run_selftest(_BlindBackend()) if not result.ok]
    assert failed == [
        name
        for fmt in FORMAT_NAMES
        for name in (f"attend, {fmt}, window, kept positions, sinks, softcap", f"NaN is reported, {fmt}")
    ]
