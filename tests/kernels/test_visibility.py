from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from octavo.block_manager import ResidualWindow, SlidingWindow
from octavo.kernels.residual import residual_starts
from octavo.kernels.visibility import visible, window_start

POSITIONS = np.arange(30, dtype=np.int32)


@pytest.mark.parametrize("window", [1, 2, 7, 30, 64])
def test_kernels_and_block_manager_agree_on_window_starts(window: int) -> None:
    for keep in (0, 3):
        sees = np.array(visible(mx.array(POSITIONS)[:, None], mx.array(POSITIONS), window, keep))
        for at, start in enumerate(window_start(POSITIONS, window).tolist()):
            assert start == SlidingWindow(num_pages=1, window=window, keep=keep).first_visible(at)
            assert np.flatnonzero(sees[at]).tolist() == [*range(min(keep, start)), *range(start, at + 1)]
    size = 4
    starts = residual_starts(POSITIONS, window=window, page_size=size)
    residual = ResidualWindow(num_pages=1, window=window, residual_of=0)
    assert [start // size for start in starts.tolist()] == [
        residual.first_visible(at) // size for at in POSITIONS.tolist()
    ]


def test_without_a_window_a_query_sees_all_before_it() -> None:
    sees = visible(mx.array(POSITIONS)[:, None], mx.array(POSITIONS), None, 0)
    assert np.array_equal(np.array(sees), np.tri(len(POSITIONS), dtype=bool))
