"""Rows for page formats: ordinary values and every corner of float32."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.kernels import FORMAT_NAMES, page_format

Floats = NDArray[np.float32]

TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)


def holds(name: str, head_dim: int) -> bool:
    try:
        page_format(name).row_bytes(head_dim)
    except ValueError:
        return False
    return True


def formats_and_dims(*head_dims: int, names: Sequence[str] = FORMAT_NAMES) -> list[tuple[str, int]]:
    return [(name, dim) for name in names for dim in head_dims if holds(name, dim)]


@functools.cache
def tricky_rows(head_dim: int) -> dict[str, Floats]:
    """Return finite rows [n, head_dim] by kind; cached, so do not change them."""
    rng = np.random.default_rng(head_dim)
    gauss = rng.standard_normal((200, head_dim)).astype(np.float32)
    outlier = gauss.copy()
    outlier[:, rng.choice(head_dim, 2, replace=False)] *= 30
    one = np.zeros((head_dim, head_dim), np.float32)
    np.fill_diagonal(one, gauss[0])
    edges = np.concatenate([TIES, np.nextafter(TIES, 0), np.nextafter(TIES, 9), [0, 0.5, 1, 1.5, 2, 3, 4]])
    ties = rng.choice(np.concatenate([edges, -edges]), (200, head_dim)).astype(np.float32)
    ties[:, 0] = 6.0
    powers = np.exp2(rng.integers(-20, 12, (200, 1))).astype(np.float32)
    magnitudes = np.exp2(rng.uniform(-149, 127, (200, head_dim))).astype(np.float32)
    return {
        "gauss": gauss,
        "outlier": outlier,
        "one element": one,
        "ties": ties * powers,
        "near ties": between_scales("fp4", gauss) if head_dim % 8 == 0 else gauss,
        "fine ties": fine_ties(rng, head_dim) * powers,
        "near fine ties": between_scales("fp5", gauss) if head_dim % 8 == 0 else gauss,
        "constant": np.broadcast_to(gauss[:, :1], gauss.shape).copy(),
        "zero": np.stack([np.zeros(head_dim), -np.zeros(head_dim)]).astype(np.float32),
        "subnormal": gauss * np.float32(1e-40),
        "tiny": gauss * np.exp2(rng.uniform(-32, -20, (200, 1))).astype(np.float32),
        "fp16 range": gauss * np.exp2(rng.uniform(10, 20, (200, 1))).astype(np.float32),
        "huge": np.clip(gauss, -3, 3) * np.float32(1e36),
        "all magnitudes": magnitudes * rng.choice(np.array([-1, 1], np.float32), magnitudes.shape),
    }


def fine_ties(rng: np.random.Generator, head_dim: int) -> Floats:
    """Return 200 rows at the boundaries between E2M2 values, with a largest value of 7."""
    ties = np.array(
        [0.125, 0.375, 0.625, 0.875, 1.125, 1.375, 1.625, 1.875, 2.25, 2.75, 3.25, 3.75, 4.5, 5.5, 6.5]
    )
    ties = ties.astype(np.float32)
    edges = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, 9), [0, 1.25, 1.75, 2.5, 5, 7]])
    rows: Floats = rng.choice(np.concatenate([edges, -edges]), (200, head_dim)).astype(np.float32)
    rows[:, -1] = 7.0
    return rows


def between_scales(name: str, rows: Floats) -> Floats:
    """Return pairs of rows, one float32 step apart, for which the format chooses different scales."""
    fmt = page_format(name)
    clipped = np.clip(rows, -3, 3)
    clipped[:, 0] = 4
    low, high = clipped[:-1].copy(), clipped[1:].copy()
    chosen_low, chosen_high = (fmt.quantize(each)[1][:, :1] for each in (low, high))
    differ = (chosen_low != chosen_high)[:, 0]
    low, high, chosen_low = low[differ], high[differ], chosen_low[differ]
    for _ in range(40):
        middle = (low.astype(np.float64) / 2 + high.astype(np.float64) / 2).astype(np.float32)
        same = fmt.quantize(middle)[1][:, :1] == chosen_low
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    return np.concatenate([low, high])
