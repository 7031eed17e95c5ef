from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from attention_backends import poison
from latent_cases import Case, Data, Floats, history, last_step, relative_errors, spec_of
from metal_backend import Emulator
from metal_cases import WatchedPool

LATENT_LIMIT = 2e-6
"""Relative errors with float32 queries: rows are exact, and sums are float32."""


@dataclass(frozen=True)
class Ran:
    got: Floats
    pool: WatchedPool
    data: Data
    emulator: Emulator


def run_latents(
    case: Case, formats: tuple[str, str], *, dtype: mx.Dtype = mx.float32, emulator: Emulator | None = None
) -> Ran:
    emulator = emulator or Emulator()
    data, pool = Data(case), WatchedPool(spec_of(case, *formats), emulator)
    poison(pool)
    data.write(pool, history(case), dtype)
    return Ran(data.step(pool, last_step(case), dtype), pool, data, emulator)


def worst_latents(
    case: Case, formats: tuple[str, str], *, dtype: mx.Dtype = mx.float32, emulator: Emulator | None = None
) -> float:
    """Return the largest relative error over all rows and heads."""
    ran = run_latents(case, formats, dtype=dtype, emulator=emulator)
    return float(relative_errors(ran.got, ran.data.truth(ran.pool, last_step(case))).max())
