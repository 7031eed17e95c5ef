"""Traffic of simple kernels, with figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from metal_emulator import Count, MetalRuntimeError, why_unavailable
from metal_samples import NUM_ROWS, run_one, run_row_sum

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.slow,
    pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or ""),
]


def test_a_copy_reads_and_writes_each_byte_once() -> None:
    traffic = run_one("const uint i = thread_position_in_grid.x; out[i] = x[i];", threads=64).traffic
    # 2 simdgroups of 32 lanes of 4 bytes: one line each
    once = Count(thread_bytes=256, bytes=256, unique_bytes=256, lines=2, min_lines=2)
    assert traffic.reads["x"] == traffic.writes["out"] == once
    assert traffic.writes["x"] == traffic.reads["out"] == Count()
    assert (traffic.bytes_read, traffic.bytes_written) == (256, 256)


def test_data_shared_by_lanes_is_read_once() -> None:
    traffic = run_one("const uint i = thread_position_in_grid.x; out[i] = x[7];", threads=64).traffic
    assert traffic.read("x") == Count(thread_bytes=256, bytes=8, unique_bytes=4, lines=2, min_lines=2)


@pytest.mark.parametrize(
    ("index", "lines", "ratio"),
    [("i", 1, 1.0), ("i + 1", 2, 2.0), ("2 * i", 2, 2.0), ("32 * i", 32, 32.0), ("31 - i", 1, 1.0)],
)
def test_lines_of_one_load(index: str, lines: int, ratio: float) -> None:
    body = f"const uint i = thread_position_in_grid.x; out[i] = x[{index}];"
    count = run_one(body, threads=32, x=np.zeros(1024, np.float32)).traffic.read("x")
    assert count == Count(thread_bytes=128, bytes=128, unique_bytes=128, lines=lines, min_lines=1)
    assert count.line_ratio == ratio


@pytest.mark.parametrize("schedule", ["random", "greedy", "reverse", "inorder"])
def test_the_order_of_lanes_does_not_matter(schedule: str) -> None:
    """Each round of a loop is one load of the simdgroup."""
    body = """
      const uint i = thread_position_in_grid.x;
      float sum = 0;
      for (uint k = i % 3; k < 8; ++k) sum += x[k * 32 + i];
      out[i] = sum;
    """
    result = run_one(body, threads=32, x=np.zeros(256, np.float32), schedule=schedule)
    count = result.traffic.read("x")
    assert count.bytes == count.unique_bytes == 4 * (32 * 8 - 11 - 2 * 10)


def test_a_reduction_by_rows() -> None:
    traffic = run_row_sum().traffic
    row_bytes = NUM_ROWS * 128 * 4
    lines = NUM_ROWS * 4
    everything = Count(
        thread_bytes=row_bytes, bytes=row_bytes, unique_bytes=row_bytes, lines=lines, min_lines=lines
    )
    assert traffic.read("x") == traffic.written("shifted") == everything
    total = traffic.written("total")
    assert (total.bytes, total.lines) == (NUM_ROWS * 4, NUM_ROWS)
    assert traffic.written("total", "shifted").bytes == row_bytes + NUM_ROWS * 4
    (load,) = [site for site in traffic.sites if site.buffer == "x"]
    assert (load.where, load.is_write, load.executions) == ("row_sum:5", False, lines)


def test_a_launch_without_checks_counts_nothing_and_reports_it() -> None:
    result = run_one("out[thread_position_in_grid.x] = 1;", checks=False)
    with pytest.raises(MetalRuntimeError, match="counts no traffic"):
        _ = result.traffic


def test_a_meeting_aligns_lanes_that_skipped_a_load() -> None:
    body = """
      const uint lane = thread_index_in_simdgroup;
      float sum = 0;
      #pragma clang loop unroll(disable)
      for (uint round = 0; round < 3; ++round) {
        float value = 0;
        if (round > 0 || lane % 2) value = x[round * 32 + lane];
        sum += simd_max(value);
      }
      out[lane] = sum;
    """
    count = run_one(body, threads=32, x=np.ones(96, np.float32)).traffic.read("x")
    assert count == Count(thread_bytes=320, bytes=320, unique_bytes=320, lines=3, min_lines=3)
