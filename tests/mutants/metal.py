"""Plant the bugs of in_metal.py in the Metal kernels, and count the bugs that tests find.

    python tests/mutants/metal.py [WORD]

WORD: plant only bugs whose name contains it. Sources on disk do not change. About two minutes.
Prints a table, then caught/total; exit status 1 if a bug is missed, or if the checks fail without a bug."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "tests/support", "tools")]

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from in_metal import MUTANTS  # noqa: E402
from mutant import Mutant  # noqa: E402
from tqdm import tqdm  # noqa: E402

import latent_cases  # noqa: E402
from latent_cases import Case  # noqa: E402
from metal_backend import Emulator  # noqa: E402
from metal_cases import EVERYTHING, LONG, LOOPING, TOLERANCES, run_watched, shape  # noqa: E402
from metal_checks import check_bytes, minimum_bytes, pages_read  # noqa: E402
from metal_emulator import MetalEmulatorError  # noqa: E402
from metal_in_place import check_copies, check_flags  # noqa: E402
from metal_latents import LATENT_LIMIT, worst_latents  # noqa: E402
from metal_recurrent import check_recurrence  # noqa: E402
from metal_residual import watched_cache  # noqa: E402
from octavo.kernels.metal import units  # noqa: E402
from recurrent_cases import conv_cases, delta_cases, gate_cases, ssd_cases  # noqa: E402
from residual_cases import run_residual  # noqa: E402

PLAIN = shape("", 80, 3, 16)
LATENT_CASES = (
    (Case(((140, 1), (20, 2)), num_heads=6, latent=512, rotary=64), ("fp4", "fp4")),
    (Case(((40, 1), (5, 9)), num_heads=20, latent=40, rotary=8, page_size=8), ("int8", "fp4")),
)
RESIDUAL = shape("residual", 64, 2, 16, window=40, keep=3, sequences=((90, 1), (30, 9), (70, 1), (20, 33)))
WIDE = shape("wide", 136, 3, 16, kv_heads=1, sequences=((20, 9), (0, 25)))


def attend(case: object = EVERYTHING, formats: tuple[str, str] = ("fp4", "fp4")) -> None:
    outcome, _ = run_watched(case, formats, mx.float16)  # type: ignore[arg-type]
    assert outcome.error < TOLERANCES[mx.float16], f"error {outcome.error:.2g}"


def split() -> None:
    outcome, emulator = run_watched(LONG, ("fp4", "fp4"), mx.float16)
    assert outcome.error < TOLERANCES[mx.float16], f"error {outcome.error:.2g}"
    moved = sum(pages_read(launch).unique_bytes for launch in emulator.ran("decode"))
    minimum = minimum_bytes(LONG, ("fp4", "fp4"))
    assert moved == minimum, f"{moved} bytes read, {minimum} needed"


def write() -> None:
    for name, dim in (("fp4", 64), ("fp4", 80), ("bf16", 64), ("fp16", 64)):
        check_bytes(name, dim, Emulator(ftz=False))


def write_packed() -> None:
    for name in ("fp5", "int8", "int4", "mxfp4", "nvfp4", "affine8", "affine4"):
        check_bytes(name, 192, Emulator(ftz=False), limit=700)


def finer() -> None:
    attend(formats=("fp5", "fp5"))


def integers() -> None:
    attend(formats=("int8", "int4"))


def microscaled() -> None:
    attend(formats=("mxfp4", "nvfp4"))


def grouped() -> None:
    attend(formats=("affine8", "affine4"))


def write_flags() -> None:
    check_flags(3)


def copy() -> None:
    check_copies(("fp4", "bf16"), 64, 16)


def everything() -> None:
    attend()


def plain() -> None:
    attend(PLAIN, ("bf16", "fp4"))


def wide() -> None:
    attend(WIDE)


def looping() -> None:
    attend(LOOPING)


def latents() -> None:
    worst = max(worst_latents(case, formats) for case, formats in LATENT_CASES)
    assert worst < LATENT_LIMIT, f"error {worst:.2g}"


def residual() -> None:
    emulator = Emulator()
    cache = watched_cache(emulator, emulator.backend(), RESIDUAL, ("fp4", "fp4"), window=17, keep=0)
    got, want = run_residual(RESIDUAL, cache, [0] * len(RESIDUAL.sequences))
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error < TOLERANCES[mx.float32], f"error {error:.2g}"
    assert all(result.reports == [] for _, result in emulator.results)


def residual_latents() -> None:
    case = latent_cases.CASES["window of pages"]
    backend, data = Emulator().backend(), latent_cases.Data(case)
    pool = latent_cases.residual_pool(backend, case, "fp4", "bf16", window=9, keep=0)
    data.write(pool, latent_cases.history(case), mx.float32)
    got = data.step(pool, latent_cases.last_step(case), mx.float32)
    want = latent_cases.residual_truth(data, pool, latent_cases.last_step(case))  # type: ignore[arg-type]
    worst = latent_cases.relative_errors(got, want).max()
    assert worst < LATENT_LIMIT, f"error {worst:.2g}"


def write_wide() -> None:
    for name in ("fp4", "fp5"):
        check_bytes(name, 512, Emulator(ftz=False), limit=100, value_dim=64)


def delta() -> None:
    check_recurrence(delta_cases)
    check_recurrence(gate_cases)


def ssd() -> None:
    check_recurrence(ssd_cases)


def conv() -> None:
    check_recurrence(conv_cases)


CHECKS: dict[str, tuple[Callable[[], None], ...]] = {
    "decode": (everything, split, plain, looping, residual),
    "reduce": (split,),
    "attention": (everything, split),
    "chunk": (everything, plain, wide, residual),
    "latent": (latents, residual_latents),
    "tile": (everything, plain, wide),
    "rows": (write,),
    "write": (write, write_flags),
    "format_fp4": (everything, write, write_wide),
    "format_fp5": (write_packed, finer, write_wide),
    "format_half": (write, plain),
    "packing": (write_packed, microscaled),
    "format_integer": (write_packed, integers),
    "format_microscaling": (write_packed, microscaled),
    "format_affine": (write_packed, grouped),
    "copy": (copy,),
    "recurrent": (delta, ssd),
    "delta": (delta,),
    "ssd": (ssd,),
    "conv": (conv,),
}


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    read = units.read_source
    helpers, body = read(mutant.file)
    count = helpers.count(mutant.old) + body.count(mutant.old)
    if count != 1:
        raise SystemExit(f"{mutant.name}: {mutant.file} has {count} times {mutant.old!r}")
    spoilt = helpers.replace(mutant.old, mutant.new), body.replace(mutant.old, mutant.new)
    units.read_source = lambda name: spoilt if name == mutant.file else read(name)  # type: ignore[assignment]
    try:
        yield
    finally:
        units.read_source = read


def caught_by(checks: tuple[Callable[[], None], ...]) -> str | None:
    for check in checks:
        try:
            check()
        except (MetalEmulatorError, AssertionError) as error:
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            return f"{check.__name__}: {lines[0].strip()[:110]}"
    return None


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    mutants = [mutant for mutant in MUTANTS if word in mutant.name]
    for check in dict.fromkeys(check for checks in CHECKS.values() for check in checks):
        if (problem := caught_by((check,))) is not None:
            print(f"the checks fail without any bug: {problem}")
            return 1
    missed = 0
    for mutant in tqdm(mutants, unit="bug", disable=None):
        began = time.monotonic()
        with planted(mutant):
            problem = caught_by(CHECKS[mutant.file])
        missed += problem is None
        tqdm.write(f"{mutant.name:46} {time.monotonic() - began:5.1f} s  {problem or 'MISSED'}")
    print(f"{len(mutants) - missed}/{len(mutants)} bugs caught")
    return 1 if missed or not mutants else 0


if __name__ == "__main__":
    sys.exit(main())
