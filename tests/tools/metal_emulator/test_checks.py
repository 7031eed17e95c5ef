from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from metal_emulator import MetalCompileError, MetalRuntimeError, why_unavailable
from metal_samples import MATRIX_PRODUCT, ROW_SUM, expected_row_sums, run_matrix_product, run_one, run_row_sum

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.slow,
    pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or ""),
]
BARRIER = "  threadgroup_barrier(mem_flags::mem_threadgroup);\n"
SEEDS = range(4)


def edited(source: str, old: str, new: str) -> str:
    assert source.count(old) == 1, old
    return source.replace(old, new)


@dataclass(frozen=True)
class Bug:
    """An edit of ROW_SUM that makes it wrong."""

    label: str
    old: str
    new: str
    report: str


def before_the_store(label: str, statement: str, report: str) -> Bug:
    return Bug(label, "  shifted[", f"  {statement}\n  shifted[", report)


MY_ELEMENT = "shifted[group * 128 + thread_index]"
THE_SUM = "const float sum = simd_sum(value);"
ENDLESS = "the kernel does not end: stopped after 1 s"

BUGS = [
    Bug("no barrier", BARRIER, "", "(read of uninitialised|data race on) threadgroup memory '(row|sums)'"),
    Bug(
        "a barrier that orders nothing",
        "mem_flags::mem_threadgroup",
        "mem_flags::mem_none",
        "data race on threadgroup memory",
    ),
    Bug(
        "a barrier of a simdgroup only",
        "threadgroup_barrier",
        "simdgroup_barrier",
        "(uninitialised|data race on) threadgroup memory",
    ),
    Bug(
        "a barrier in one simdgroup",
        BARRIER,
        f"  if (simdgroup_index_in_threadgroup == 0) {BARRIER.strip()}\n",
        "deadlock|data race|uninitialised",
    ),
    Bug(
        "a barrier in half a simdgroup",
        BARRIER,
        f"{BARRIER}  if (thread_index < 16) {BARRIER.strip()}\n",
        "deadlock .divergent barrier.*16 threads .* wait at threadgroup_barrier",
    ),
    Bug(
        "two barriers for one",
        BARRIER,
        f"  if (thread_index < 64)\n  {BARRIER}  else\n  {BARRIER}",
        "divergent threadgroup_barrier: thread .* waits at line",
    ),
    Bug(
        "a read of another simdgroup's element before the barrier",
        BARRIER,
        f"  if (row[(thread_index + 32) % 128] == 1e9f) return;\n{BARRIER}",
        "(uninitialised|data race on) threadgroup memory 'row'",
    ),
    before_the_store(
        "a write after an unordered read",
        "row[thread_index] = neighbour;",
        "data race on threadgroup memory 'row'.*(write after unordered read|read after unordered write)",
    ),
    Bug(
        "a sum in divergent code",
        THE_SUM,
        "float sum = 0; if (thread_index % 2) sum = simd_sum(value);",
        "divergent simdgroup operation|deadlock",
    ),
    Bug(
        "lanes at different operations",
        THE_SUM,
        "float sum = 0;\nif (thread_index % 2) sum = simd_sum(value); else\nsum = simd_max(value);",
        "divergent simdgroup operation: lane .* is at simd_(sum|max) .*but lane",
    ),
    Bug("a threadgroup array too small", "row[128]", "row[127]", "out_of_bounds|out-of-bounds"),
    Bug(
        "too much threadgroup memory",
        "row[128]",
        "row[8192]",
        "threadgroup memory: .* bytes exceed Apple's limit of 32768",
    ),
    Bug(
        "a read past the input",
        "group * 128 + thread_index];",
        "group * 128 + thread_index + 1];",
        r"out-of-bounds read of 4 bytes at byte offset 1536 of 'x' \(1536 bytes\)",
    ),
    Bug(
        "a read far before the input",
        "group * 128 + thread_index];",
        "long(thread_index) - 100000000];",
        "out-of-bounds read of 4 bytes at byte offset -",
    ),
    Bug(
        "a write past the output",
        MY_ELEMENT,
        "shifted[group * 128 + thread_index + 1]",
        "out-of-bounds write of 4 bytes at byte offset 1536 of 'shifted'",
    ),
    Bug(
        "two threadgroups write one element",
        "total[group]",
        "total[0]",
        "data race on output 'total' .* of another threadgroup",
    ),
    Bug(
        "two threads write one element",
        MY_ELEMENT,
        "shifted[group * 128 + (thread_index & ~1u)]",
        "data race on output 'shifted'",
    ),
    Bug(
        "an output partly written",
        "if (thread_index == 0) total",
        "if (thread_index == 0 && group) total",
        "output 'total': 4 of 12 bytes never written .first at byte 0.",
    ),
    before_the_store(
        "an output read before it is written",
        f"if ({MY_ELEMENT} == 1) return;",
        "read of uninitialised output 'shifted'",
    ),
    before_the_store(
        "a misaligned vector load",
        "if (dot(*(const device float4*)(x + 1), float4(1.0f)) == 1e9f) return;",
        "misaligned access",
    ),
    before_the_store(
        "integer overflow",
        "if (int(group + 2147483647) + int(thread_index + 1) == 5) return;",
        "add_overflow",
    ),
    before_the_store(
        "a shift by too much", "if (1 << int(thread_index) == 5) return;", "shift_out_of_bounds"
    ),
    before_the_store(
        "a float too large for an int",
        "if (int(1e20f * (1 + thread_index)) == 5) return;",
        "float_cast_overflow",
    ),
    before_the_store(
        "integer division by zero", "if (100 / int(group) == 5) return;", "divrem_overflow|division by zero"
    ),
    before_the_store(
        "a loop without end", f"for (uint i = 0; i < 128; i += group / 100) {MY_ELEMENT} += row[i];", ENDLESS
    ),
    before_the_store(
        "a loop without end that touches nothing", "for (volatile int i = 0; i < 1;) {}", ENDLESS
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.label)
def test_a_bug_is_reported(bug: Bug) -> None:
    body = edited(ROW_SUM, bug.old, bug.new)
    seeds = range(1) if bug.report == ENDLESS else SEEDS
    for seed in seeds:
        with pytest.raises(MetalRuntimeError, match=bug.report):
            run_row_sum(body, seed=seed, time_limit_s=1)


@pytest.mark.parametrize("schedule", ["mixed", "random", "greedy", "reverse", "inorder"])
def test_a_clean_kernel_has_no_reports(schedule: str) -> None:
    expected = expected_row_sums()
    for seed in range(8):
        result = run_row_sum(seed=seed, schedule=schedule)
        assert result.reports == []
        assert result.stats.warnings == ""
        np.testing.assert_allclose(result.outputs[0], expected.total, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(result.outputs[1], expected.shifted)


def test_a_clean_matrix_kernel_has_no_reports() -> None:
    for seed in range(8):
        assert run_matrix_product(seed=seed).reports == []


def test_a_missing_simdgroup_barrier_is_a_race() -> None:
    body = edited(MATRIX_PRODUCT, "  simdgroup_barrier(mem_flags::mem_threadgroup);\n", "")
    for seed in SEEDS:
        with pytest.raises(MetalRuntimeError, match="threadgroup memory 'tile'"):
            run_matrix_product(body, seed=seed)


def test_a_matrix_operation_of_some_lanes_is_refused() -> None:
    body = edited(MATRIX_PRODUCT, "  simdgroup_multiply", "  if (lane < 16) simdgroup_multiply")
    with pytest.raises(MetalRuntimeError, match=r"divergent simdgroup operation|deadlock"):
        run_matrix_product(body)


def test_lanes_that_read_and_later_write_their_own_element_do_not_race() -> None:
    body = """
      threadgroup float tile[32];
      const uint lane = thread_index_in_simdgroup;
      tile[lane] = x[lane];
      simdgroup_barrier(mem_flags::mem_threadgroup);
      float sum = tile[(lane + 1) % 32] + tile[lane];
      simdgroup_barrier(mem_flags::mem_threadgroup);
      sum += tile[lane];
      tile[lane] = sum;
      out[lane] = tile[lane];
    """
    for seed in SEEDS:
        assert run_one(body, threads=32, seed=seed).reports == []


@pytest.mark.parametrize("threads", [32, 64])
def test_a_write_may_not_follow_an_unordered_read(threads: int) -> None:
    body = """
      threadgroup float shared[1];
      const uint i = thread_index_in_threadgroup;
      if (i == 0) shared[0] = 5;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      out[i] = shared[0];
      ORDERED
      if (i + 1 == threads_per_threadgroup.x) shared[0] = 6;
    """
    barrier = "simdgroup_barrier" if threads == 32 else "threadgroup_barrier"
    ordered = body.replace("ORDERED", f"{barrier}(mem_flags::mem_threadgroup);")
    assert run_one(ordered, threads=threads, schedule="inorder").reports == []
    with pytest.raises(MetalRuntimeError, match="write after unordered read by thread") as raised:
        run_one(body.replace("ORDERED", ""), threads=threads, schedule="inorder")
    assert "after unordered write" not in str(raised.value)


def test_both_sides_of_a_race_are_named() -> None:
    body = edited(ROW_SUM, "mem_flags::mem_threadgroup", "mem_flags::mem_none")
    result = run_row_sum(body, raise_on_report=False)
    assert any(
        "at row_sum:10" in report and "other access at row_sum:6" in report for report in result.reports
    )


def test_elements_that_are_not_owned_may_not_be_read() -> None:
    owned = np.ones(64, np.bool_)
    owned[40] = False
    body = "const uint i = thread_position_in_grid.x; out[i] = x[i];"
    assert run_one(body, threads=40, valid={"x": owned}).reports == []
    with pytest.raises(MetalRuntimeError, match="the host marked invalid: 'x' byte offset 160"):
        run_one(body, threads=41, valid={"x": owned})
    with pytest.raises(MetalRuntimeError, match=r"valid names \['y'\], inputs are \['x'\]"):
        run_one(body, valid={"y": owned})


def test_a_mask_is_broadcast_over_trailing_axes() -> None:
    pages = np.zeros((4, 2, 8), np.float32)
    owned = np.array([True, True, False, True]).reshape(4, 1, 1)
    body = "const uint i = thread_position_in_grid.x; if (i / 16 != 2) out[i] = x[i];"
    assert run_one(body, threads=64, x=pages, valid={"x": owned}).reports == []
    with pytest.raises(MetalRuntimeError, match="the host marked invalid: 'x'"):
        run_one(body.replace("!= 2", "== 2"), threads=64, x=pages, valid={"x": owned})


def test_inputs_cannot_be_written() -> None:
    with pytest.raises(MetalCompileError, match=r"read-only|const"):
        run_one("x[0] = 1;")
    with pytest.raises(MetalRuntimeError, match="write to read-only input 'x'"):
        run_one("((device float*)x)[3] = 1;")


def test_uninitialised_memory_is_nan() -> None:
    body = "threadgroup float s[4]; out[0] = s[1];"
    result = run_one(body, raise_on_report=False)
    assert np.isnan(result.outputs[0][0])
    assert "read of uninitialised threadgroup memory 's'" in result.reports[0]


@pytest.mark.parametrize("checks", [True, False])
def test_uninitialised_variables_are_nan(checks: bool) -> None:
    body = "float sums[8]; for (int i = 0; i < 8; ++i) sums[i] += x[i]; out[0] = sums[int(x[3])];"
    assert np.isnan(run_one(body, checks=checks).outputs[0][0])


def test_without_checks_guard_pages_still_hold() -> None:
    body = "out[0] = x[64];"
    with pytest.raises(MetalRuntimeError, match=r"access fault .guard page. at byte offset 256 of 'x'"):
        run_one(body, checks=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threadgroup": 1025}, "more than 1024 threads"),
        ({"grid": (0, 1, 1)}, "three positive numbers"),
        ({"output_shapes": []}, "0 output_shapes for 1 outputs"),
    ],
)
def test_an_impossible_launch_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(MetalRuntimeError, match=message):
        run_one("out[0] = 1;", **change)


def test_a_kernel_that_does_not_compile_names_the_reason() -> None:
    with pytest.raises(MetalCompileError, match=r"one:2:.*undeclared_name"):
        run_one("out[0] = 1;\nout[1] = undeclared_name;")


def test_lanes_may_diverge_on_request() -> None:
    """strict=False: an operation sees the active lanes, as on a GPU in lock-step."""
    body = """
      const uint lane = thread_index_in_simdgroup;
      if (lane < 8) out[lane] = simd_sum(1.0f);
      else out[lane] = simd_sum(2.0f);
      for (uint i = 0; i < lane; ++i)
        out[32 + lane] += simd_sum(1.0f);
    """
    # in round i of the loop, lanes i + 1 and higher are active
    rounds = [sum(31 - i for i in range(lane)) for lane in range(32)]
    expected = np.array([8.0] * 8 + [48.0] * 24 + rounds, np.float32)
    for seed in SEEDS:
        result = run_one(body, threads=32, strict=False, seed=seed)
        np.testing.assert_array_equal(result.outputs[0], expected)
