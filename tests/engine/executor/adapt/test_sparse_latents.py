from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from octavo.engine.executor.adapt import sparse_latents

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("levels", [3, 1000], ids=["equal scores", "different scores"])
def test_the_best_positions_are_the_largest_and_then_the_earliest(levels: int) -> None:
    rng = np.random.default_rng(0)
    scores = rng.integers(0, levels, (40, 40)).astype(np.float32)
    positions = np.arange(40, dtype=np.int32)
    chosen = np.array(sparse_latents.best_positions(mx.array(scores), mx.array(positions), 7))
    for row, at in enumerate(positions):
        best = np.argsort(-scores[row, : at + 1], kind="stable")[:7]
        assert sorted(best) == np.flatnonzero(chosen[row]).tolist()
    wider = np.pad(scores, ((0, 0), (0, 9)), constant_values=1e9)
    padded = sparse_latents.best_positions(mx.array(wider), mx.array(positions), 7)
    assert np.array_equal(np.array(padded)[:, :40], chosen), "what lies beyond a row's position is nothing"
