"""Registers, scratch memory and instructions of the Metal kernels, as compiled for an AMD GPU.

Run ``python tools/metal_resources.py``. See tools/metal_emulator/resources.py for the meaning of the numbers.
The exit code is 1 if a shape in LIMITED or a recurrence needs scratch memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tools")]

import mlx.core as mx  # noqa: E402

from check_metal import run_recurrences, run_step  # noqa: E402
from metal_emulator.assemble import KernelSource  # noqa: E402
from metal_emulator.resources import MAX_REGISTERS, Resources, measure  # noqa: E402
from octavo.kernels.interface import LayerSpec  # noqa: E402
from octavo.kernels.metal.launch import KernelLibrary  # noqa: E402

SHAPES = tuple(
    (name, dim, group)
    for name, dim in (("fp4", 128), ("fp4", 64), ("fp4", 256), ("bf16", 128), ("int8", 128))
    for group in (1, 4, 8)
)
LATENTS = tuple((name, 512, heads) for name in ("fp4", "fp5", "int8", "bf16") for heads in (16, 128))
"""MLA kernels to examine: format, latent width and number of query heads."""

LIMITED = (("fp4", 128), ("fp4", 64), ("fp4", 256), ("fp4", 512), ("fp5", 512), ("int8", 512), ("bf16", 512))
"""Format and head dim of the attention kernels that must not use scratch memory."""


def examine(
    name: str, dim: int, group: int, *, only: str | None = None, latents: bool = False
) -> dict[str, Resources]:
    """Return the resources of attention kernels by name, for K and V in the format ``name``.

    With ``latents``, return the resources for latents in this format, 64 rotary values in bf16 and ``group``
    heads.
    """
    found: dict[str, Resources] = {}
    library = _measuring(found, only)
    if latents:
        layer = LayerSpec(num_kv_heads=1, head_dim=dim, value_dim=64)
        run_step(library, (name, "bf16"), layer, group, mx.float16, options=False, latents=True)
    else:
        layer = LayerSpec(num_kv_heads=2, head_dim=dim, value_dim=dim)
        run_step(library, (name, name), layer, group, mx.float16, options=False)
    return found


def examine_recurrences(width: int, height: int) -> dict[str, Resources]:
    found: dict[str, Resources] = {}
    run_recurrences(_measuring(found, None, by_unit=True), mx.bfloat16, width=width, height=height)
    return found


def _measuring(found: dict[str, Resources], only: str | None, *, by_unit: bool = False) -> KernelLibrary:
    def compile_kernel(
        *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
    ) -> Callable[..., list[mx.array]]:
        kernel = KernelSource(name, tuple(input_names), tuple(output_names), source, header)

        def launch(
            *, inputs: Any, output_shapes: Any, output_dtypes: Any, threadgroup: Any, **_: Any
        ) -> list[mx.array]:
            kind = name if by_unit else name.split("_")[1]
            if kind not in found and only in (
                None,
                kind,
            ):
                found[kind] = measure(kernel, inputs, output_dtypes, threadgroup)
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    return KernelLibrary(compile_kernel)


STATES = ((64, 64), (128, 128), (128, 64), (256, 256))
"""Widths and heights of recurrent states."""


def main() -> int:
    print(f"at most {MAX_REGISTERS} registers; instructions of the largest loop by kind")
    failed = 0
    shapes = [(*shape, False) for shape in SHAPES] + [(*shape, True) for shape in LATENTS]
    for name, dim, group, latents in shapes:
        for kernel, found in examine(name, dim, group, latents=latents).items():
            largest = max(found.loops, key=lambda loop: loop.total(), default=None)
            kinds = "" if largest is None else ", ".join(f"{n} {kind}" for kind, n in largest.most_common())
            over = (
                kernel in ("decode", "chunk", "latent") and found.scratch_bytes > 0 and (name, dim) in LIMITED
            )
            failed += over
            print(
                f"{kernel:8} {name:5} D={dim:3} G={group:3}: {found.registers:3} registers, "
                f"{found.scratch_bytes:4} bytes of scratch{' (too many)' if over else ''}, "
                f"{found.threadgroup_bytes:5} of threadgroup memory; {kinds}"
            )
    for width, height in STATES:
        for kernel, found in examine_recurrences(width, height).items():
            failed += found.scratch_bytes > 0
            print(
                f"{kernel.removeprefix('octavo_'):44}: {found.registers:3} registers, "
                f"{found.scratch_bytes:4} bytes of scratch, {found.threadgroup_bytes:5} of threadgroup memory"
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
