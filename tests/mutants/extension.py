"""Plant the bugs of in_native.py in the native kernels, and count the bugs that tests find.

    python tests/mutants/extension.py [WORD]

WORD: plant only bugs whose name contains it. Each bug is built in build/mutants, in about a minute.
Prints a table; exit status 1 if a bug is missed, or if the tests fail without a bug."""

from __future__ import annotations

import filecmp
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import in_native
import in_native_attention
from harness import hunt, run_tests, spoilt
from mutant import ROOT, Mutant

FOLDER = ROOT / "build" / "mutants"
SOURCE, BUILD = FOLDER / "source", FOLDER / "build"

PROGRAM = ("tests/engine/executor/native/test_program.py", "tests/engine/executor/native/test_greedy_head.py")
LINEAR = ("tests/engine/executor/native/test_linear.py::test_every_level_agrees_with_float64[avx2]",)
CHANNELS = ("tests/engine/executor/native/test_linear.py::test_every_level_agrees_with_float64[avx512]",)
QUANTIZED = (
    "tests/kernels/cpu/test_quantize_channels.py::test_channel_quantization_follows_the_definition",
    "tests/kernels/cpu/test_quantize_channels.py::test_affine_weights_requantize_like_their_floats",
)
AFFINE = (
    "tests/kernels/cpu/test_quantize_affine.py::test_affine_quantization_is_bit_identical_to_mlx",
    "tests/kernels/cpu/test_quantize_affine.py::test_nan_has_code_zero_and_leaves_the_rest_of_its_group_as_it_is",
)
PACKED = ("tests/engine/executor/native/test_pack_quantized.py",)
MAPPED = ("tests/engine/executor/native/test_mapped.py",)
BYTES = tuple(
    f"tests/kernels/cpu/test_attention.py::{name}"
    for name in (
        "test_rounding_to_bytes_is_small_beside_the_error_of_the_pages",
        "test_rounding_weights_to_bytes_loses_no_mass",
        "test_long_contexts_equal_truth",
        "test_every_instruction_set_equals_truth[avx2]",
    )
)
CODES = (
    *(
        f"tests/kernels/cpu/test_attention.py::{name}"
        for name in (
            "test_every_instruction_set_equals_truth[avx512]",
            "test_rounding_weights_to_bytes_loses_no_mass",
            "test_long_contexts_equal_truth",
        )
    ),
    "tests/kernels/cpu/test_attention_bits.py",
)
STORES = tuple(
    f"tests/kernels/cpu/test_pages.py::{name}"
    for name in (
        "test_any_floats_are_stored_as_the_format_says_or_reported",
        "test_pages_are_bit_equal_to_the_numpy_format",
    )
)
POOLS = (
    "tests/kernels/test_residual_attention.py",
    "tests/kernels/test_latent_attention.py",
    "tests/kernels/cpu/test_long_context_bits.py",
    "tests/kernels/cpu/test_attention.py::test_logits_that_grow_from_tile_to_tile[avx2]",
)
ROWS = (
    "tests/engine/executor/native/test_ops.py::test_results_in_16_bits_are_rounded_float32_results",
    "tests/engine/executor/native/test_compute_rows.py",
)
SAMPLING = tuple(
    f"tests/kernels/cpu/test_native_sampling.py::{name}"
    for name in (
        "test_large_rows_are_sampled_as_defined",
        "test_tokens_are_those_of_the_sampler_in_numpy",
        "test_log_probabilities_are_those_of_float64",
        "test_changed_tokens_are_sampled_as_if_the_row_had_them",
    )
)
SUITES = (
    (in_native.STEPS, PROGRAM),
    (in_native.MAPPED, MAPPED),
    (in_native_attention.ATTENTION, BYTES),
    (in_native_attention.CODES, CODES),
    (in_native.STORES, STORES),
    (in_native.LINEAR, LINEAR),
    (in_native.CHANNELS, CHANNELS),
    (in_native.QUANTIZED, QUANTIZED),
    (in_native.AFFINE, AFFINE),
    (in_native.PACKED, PACKED),
    (in_native.POOLS, POOLS),
    (in_native.ROWS, ROWS),
    (in_native.SAMPLING, SAMPLING),
)
TESTS = {mutant.name: tests for mutants, tests in SUITES for mutant in mutants}


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ... failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def refresh(source: str, target: str) -> None:
    if not Path(target).exists() or not filecmp.cmp(source, target, shallow=False):
        shutil.copyfile(source, target)


def prepare() -> None:
    (SOURCE / "kernels").mkdir(parents=True, exist_ok=True)
    shutil.copy2(ROOT / "CMakeLists.txt", SOURCE)
    for path in [path for path in (SOURCE / "kernels" / "csrc").rglob("*") if path.is_file()]:
        if not (ROOT / path.relative_to(SOURCE)).exists():
            path.unlink()
    copies = SOURCE / "kernels" / "csrc"
    shutil.copytree(ROOT / "kernels" / "csrc", copies, dirs_exist_ok=True, copy_function=refresh)
    options = (
        "-DCMAKE_BUILD_TYPE=Release",
        "-DSKBUILD_STATE=editable",
        f"-DPython_EXECUTABLE={sys.executable}",
    )
    call("cmake", "-S", str(SOURCE), "-B", str(BUILD), *options)


def build() -> Path:
    call("cmake", "--build", str(BUILD), "--target", "_ext")
    (built,) = BUILD.glob("_ext*.so")
    return built


def level_of(mutant: Mutant) -> str:
    """Return the instruction set whose kernel has the bug; empty if all have it."""
    return next((level for level in ("avx2", "avx512") if f"_{level}." in mutant.file), "")


def run_at(level: str, tests: tuple[str, ...]) -> str | None:
    isa = {"OCTAVO_CPU_ISA": level} if level else {}
    return run_tests(tests, {"TEST_EXTENSION": str(build()), **isa})


def attempt(mutant: Mutant) -> str | None:
    path = SOURCE / mutant.file
    text = path.read_text()
    path.write_text(spoilt(mutant, text))
    try:
        return run_at(level_of(mutant), TESTS[mutant.name])
    finally:
        path.write_text(text)


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    mutants = [mutant for mutant in in_native.MUTANTS if word in mutant.name]
    prepare()
    suites = dict.fromkeys((level_of(mutant), TESTS[mutant.name]) for mutant in mutants)
    clean: list[Callable[[], str | None]] = [partial(run_at, *suite) for suite in suites]
    return hunt(mutants, attempt, clean=clean)


if __name__ == "__main__":
    sys.exit(main())
