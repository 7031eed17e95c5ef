"""Rows that page formats must get right: ordinary ones and every corner of float32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)


def tricky_rows(head_dim: int) -> dict[str, Floats]:
    """Finite rows [n, head_dim] by kind."""
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
        "constant": np.broadcast_to(gauss[:, :1], gauss.shape).copy(),
        "zero": np.stack([np.zeros(head_dim), -np.zeros(head_dim)]).astype(np.float32),
        "subnormal": gauss * np.float32(1e-40),
        "tiny": gauss * np.exp2(rng.uniform(-32, -20, (200, 1))).astype(np.float32),
        "fp16 range": gauss * np.exp2(rng.uniform(10, 20, (200, 1))).astype(np.float32),
        "huge": np.clip(gauss, -3, 3) * np.float32(1e36),
        "all magnitudes": magnitudes * rng.choice(np.array([-1, 1], np.float32), magnitudes.shape),
    }
