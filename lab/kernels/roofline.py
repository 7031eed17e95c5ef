"""Measured limits of this machine: read rate and matmul rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import numpy as np

READ_BYTES = 768 * 1024**2  # bytes, well beyond a process's share of the last-level cache
TILE = 2048  # rows and columns of NumPy's matrices, which fit the cache


Clock = Callable[[], float]
"""Function that returns seconds: ``time.perf_counter``, or ``time.process_time`` for kernels on one thread,
which depends less on other programs."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Limits of the machine."""

    dram_read_gb_s: float
    matmul_gflop_s: float
    matmul_by: str

    def as_dict(self) -> dict[str, float | str]:
        return asdict(self)

    def best_of(self, other: Roofline) -> Roofline:
        """Return the higher value of each limit."""
        faster = max(self, other, key=lambda roofline: roofline.matmul_gflop_s)
        return replace(faster, dram_read_gb_s=max(self.dram_read_gb_s, other.dram_read_gb_s))

    def __str__(self) -> str:
        return (
            f"DRAM read {self.dram_read_gb_s:.1f} GB/s, "
            f"matmul {self.matmul_gflop_s:.0f} GFLOP/s ({self.matmul_by})"
        )


def measure_roofline(*, threads: int, available: int, clock: Clock = time.perf_counter) -> Roofline:
    """Return the best of several runs on ``threads`` threads, with at most half of ``available`` bytes."""
    num_bytes = min(READ_BYTES, available // 2)
    rates = {"float32, NumPy": _numpy_matmul_rate(clock), **_native_rates()}
    by = max(rates, key=lambda name: rates[name])
    return Roofline(_read_rate(threads, num_bytes, clock) / 1e9, rates[by] / 1e9, by)


def best_seconds(run: Callable[[], object], *, repeats: int = 5, clock: Clock = time.perf_counter) -> float:
    """Return the shortest of several timed calls, after an untimed one."""
    run()
    best = float("inf")
    for _ in range(repeats):
        began = clock()
        run()
        best = min(best, clock() - began)
    return best


def _read_rate(threads: int, num_bytes: int, clock: Clock) -> float:
    parts = np.array_split(np.ones(num_bytes // 4, np.float32), 4 * threads)
    with ThreadPoolExecutor(threads) as executor:  # NumPy releases the interpreter lock
        seconds = best_seconds(
            lambda: list(executor.map(lambda part: np.dot(part, part), parts)), clock=clock
        )
    return num_bytes / seconds


def _numpy_matmul_rate(clock: Clock) -> float:
    left = np.ones((512, TILE), np.float32)
    right = np.ones((TILE, TILE), np.float32)
    return 2 * left.size * TILE / best_seconds(lambda: left @ right, clock=clock)


def _native_rates() -> dict[str, float]:
    try:
        from octavo.kernels import _ext
    except ImportError:
        return {}
    float32, bf16 = _ext.measure_flops()
    return {"float32, in registers": float32, "bf16, in registers": bf16}
