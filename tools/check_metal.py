"""Write every Metal kernel as MLX would compile it, and compile it with Apple's compiler.

``python tools/check_metal.py [FOLDER]`` writes a .metal file per kernel, by default into build/metal. On a
Mac with Xcode it compiles each file and exits with 1 if one fails. Elsewhere it exits with 0.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests" / "support"), str(ROOT / "tools")]  # for the emulator's ``assemble``

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from format_rows import holds  # noqa: E402
from metal_emulator.assemble import KernelSource, assemble  # noqa: E402
from metal_emulator.tensors import Tensor  # noqa: E402
from octavo.kernels.interface import AttendOptions, LayerSpec, PoolSpec  # noqa: E402
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata  # noqa: E402
from octavo.kernels.metal.backend import MetalBackend  # noqa: E402
from octavo.kernels.metal.launch import KernelLibrary  # noqa: E402
from octavo.kernels.metal.recurrent import MetalRecurrences, SegmentArrays  # noqa: E402
from octavo.kernels.metal.units import METAL_FORMATS  # noqa: E402
from octavo.kernels.recurrent_kernels import GATES  # noqa: E402
from octavo.kernels.state_segments import StateSegments  # noqa: E402

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
GROUPS = (1, 3, 16)
DTYPES = (mx.float16, mx.bfloat16)
PRELUDE = '#include "mlx/backend/metal/kernels/utils.h"\n'
COMPILER = ("xcrun", "-sdk", "macosx", "metal")
LANGUAGES = ("metal3.1", "metal3.2", "metal4.0", "metal4.1")
"""Language versions of macOS 14, 15, 26 and 27. MLX compiles for the version of the system it runs on."""


class Recorder:
    """Stand-in for ``mx.fast.metal_kernel`` that records the source text and returns zeros."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def __call__(
        self, *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
    ) -> Callable[..., list[mx.array]]:
        kernel = KernelSource(name, tuple(input_names), tuple(output_names), source, header)

        def launch(
            *, inputs: Sequence[mx.array], output_shapes: Any, output_dtypes: Any, **_: Any
        ) -> list[mx.array]:
            assembled = assemble(kernel, [Tensor.of(array) for array in inputs], output_dtypes)
            self.texts[assembled.kernel_name] = PRELUDE + assembled.text
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch


def mixed_step() -> AttentionMetadata:
    lengths, rows = (5, 600, 40), (1, 1, 9)
    used = [-(-length // 32) for length in lengths]
    table = np.zeros((3, max(used)), np.int32)
    for b, (first, count) in enumerate(zip(np.cumsum([0, *used]), used, strict=False)):
        table[b, :count] = np.arange(first, first + count)
    at = [np.arange(end - n, end, dtype=np.int32) for end, n in zip(lengths, rows, strict=True)]
    slots = [table[b, p // 32] * 32 + p % 32 for b, p in enumerate(at)]
    return AttentionMetadata(
        positions=np.concatenate(at),
        q_start=np.cumsum([0, *rows]).astype(np.int32),
        kv_len=np.array(lengths, np.int32),
        groups=(GroupMetadata(slots=np.concatenate(slots).astype(np.int32), page_table=table),),
        page_size=32,
    )


def short_step() -> AttentionMetadata:
    return AttentionMetadata(
        positions=np.array([4], np.int32),
        q_start=np.array([0, 1], np.int32),
        kv_len=np.array([5], np.int32),
        groups=(GroupMetadata(slots=np.array([4], np.int32), page_table=np.array([[0]], np.int32)),),
        page_size=32,
    )


def run_step(
    library: KernelLibrary,
    formats: tuple[str, str],
    layer: LayerSpec,
    group: int,
    dtype: mx.Dtype,
    *,
    options: bool,
    latents: bool = False,
) -> None:
    spec = PoolSpec(layers=(layer,), num_pages=24, page_size=32, k_format=formats[0], v_format=formats[1])
    pool = MetalBackend(library).create_pool(spec)
    metadata, heads = mixed_step(), layer.num_kv_heads * group
    pool.copy_pages([(22, 23)])
    pool.begin_step(metadata)
    rows = (metadata.num_tokens, layer.num_kv_heads)
    pool.write(0, mx.zeros((*rows, layer.head_dim), dtype), mx.zeros((*rows, layer.value_dim), dtype))
    for step in (metadata, short_step()):
        pool.begin_step(step)
        pool.attend(
            0,
            mx.zeros((step.num_tokens, heads, layer.head_dim), dtype),
            AttendOptions(
                scale=0.1,
                sinks=mx.zeros(heads) if options else None,
                softcap=30.0 if options and not latents else None,
                rotary=mx.zeros((step.num_tokens, heads, layer.value_dim), dtype) if latents else None,
            ),
        )


def attend_residual(
    library: KernelLibrary, formats: tuple[str, str], layer: LayerSpec, group: int, *, latents: bool = False
) -> None:
    spec = PoolSpec(layers=(layer,), num_pages=24, page_size=32, k_format=formats[0], v_format=formats[1])
    beside = replace(spec, layers=(replace(layer, window=1),), k_format="bf16", v_format="bf16")
    cache, metadata = MetalBackend(library).create_residual_pool(spec, beside), mixed_step()
    heads = (metadata.num_tokens, layer.num_kv_heads * group)
    cache.begin_step(replace(metadata, groups=metadata.groups * 2))
    rotary = mx.zeros((*heads, layer.value_dim), mx.bfloat16) if latents else None
    cache.attend(0, mx.zeros((*heads, layer.head_dim), mx.bfloat16), AttendOptions(scale=0.1, rotary=rotary))


def run_recurrences(library: KernelLibrary, dtype: mx.Dtype, *, width: int, height: int) -> None:
    kernels, rows, heads = MetalRecurrences(library), 4, 4
    step = SegmentArrays.of(StateSegments.of([1, 3], source=[0, 1], checkpoints=[(2, 2)]))
    pool = mx.zeros((3, heads, height, width))
    q, k, v = (mx.zeros((rows, *shape), dtype) for shape in ((2, width), (2, width), (heads, height)))
    head, of_head = mx.zeros((rows, heads), dtype), mx.zeros(heads)
    for gate, A_log in ((head, of_head), (mx.zeros((rows, heads, width), dtype), mx.zeros((heads, width)))):
        for kind in range(len(GATES)):
            parameters = [mx.zeros(gate.shape[1:]), A_log] if kind else []
            inputs = [q, k, v, gate, head, *parameters]
            kernels.recurrence("gated_delta", pool, step, inputs, [kind, 0.0, 1.0])
    kernels.recurrence("ssd", pool, step, [v, q, k, head, *[of_head] * 3], [0.0, float("inf")])
    for silu, bias in ((0.0, [mx.zeros(width, dtype)]), (1.0, [])):
        windows, weight = mx.zeros((3, 3, width), dtype), mx.zeros((4, width), dtype)
        kernels.recurrence("causal_conv", windows, step, [q[:, 0], weight, *bias], [silu])


def record_all() -> dict[str, str]:
    recorder = Recorder()
    library = KernelLibrary(recorder)
    pairs = [(name, name) for name in METAL_FORMATS] + [
        ("bf16", "fp4"),
        ("fp4", "fp16"),
        ("int8", "fp4"),
    ]
    dtypes = itertools.cycle(DTYPES)
    for head_dim, group, formats in itertools.product(HEAD_DIMS, GROUPS, pairs):
        if not all(holds(name, head_dim) for name in formats):
            continue
        layer, dtype = LayerSpec(num_kv_heads=2, head_dim=head_dim, value_dim=head_dim), next(dtypes)
        run_step(library, formats, layer, group, dtype, options=False)
    for head_dim, formats in itertools.product((64, 128), pairs):
        layer = LayerSpec(num_kv_heads=2, head_dim=head_dim, value_dim=head_dim, window=560, keep=4)
        run_step(library, formats, layer, 4, mx.float16, options=True)
        attend_residual(library, formats, layer, 4)
        attend_residual(library, formats, replace(layer, window=None, keep=0), 4)
    for heads, formats in itertools.product((4, 128), pairs):
        layer = LayerSpec(num_kv_heads=1, head_dim=512, value_dim=64)
        run_step(library, formats, layer, heads, mx.bfloat16, options=heads == 4, latents=True)
        attend_residual(library, formats, replace(layer, window=560, keep=4), heads, latents=True)
    layer = LayerSpec(num_kv_heads=2, head_dim=192, value_dim=128)
    run_step(library, ("fp4", "fp4"), layer, 4, mx.float16, options=False)
    for width, height in ((16, 24), (64, 64), (128, 128), (128, 64), (192, 128), (256, 256)):
        run_recurrences(library, next(dtypes), width=width, height=height)
    return recorder.texts


def has_compiler() -> bool:
    try:
        return subprocess.run([*COMPILER, "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def known_languages(folder: Path) -> list[str]:
    empty = folder / "empty.metal"
    empty.write_text("#include <metal_stdlib>\n")
    return [language for language in LANGUAGES if compile_unit(empty, language) is None]


def compile_unit(path: Path, language: str) -> str | None:
    """Return the compiler's messages; None if the file compiles."""
    include = Path(mx.__file__).parent / "include"
    command = [
        *COMPILER,
        f"-std={language}",
        "-fno-fast-math",
        f"-I{include}",
        "-c",
        str(path),
        "-o",
        "/dev/null",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "metal"
    folder.mkdir(parents=True, exist_ok=True)
    texts = record_all()
    for name, text in texts.items():
        (folder / f"{name}.metal").write_text(text)
    print(f"{len(texts)} units written to {folder}")
    if not has_compiler():
        print(f"`{' '.join(COMPILER)}` is not on this machine: nothing was compiled")
        return 0
    languages = known_languages(folder)
    if not languages:
        print(f"`{' '.join(COMPILER)}` knows none of {', '.join(LANGUAGES)}: nothing was compiled")
        return 1
    failed = 0
    for name, language in itertools.product(texts, languages):
        if (said := compile_unit(folder / f"{name}.metal", language)) is not None:
            failed += 1
            print(f"{name} does not compile as {language}:\n{said}")
    total = len(texts) * len(languages)
    print(f"{total - failed} of {total} compilations succeed ({len(texts)} units, {', '.join(languages)})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
