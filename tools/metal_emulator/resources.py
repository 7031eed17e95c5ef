"""Registers, scratch memory and instructions of a kernel, as compiled for an AMD GPU.

The target gfx1100 has waves of 32 lanes and 32-bit registers, like Apple's GPUs. It is only a proxy: Apple's
compiler allots registers by its own rules. It shows how many values are live at once, arrays that end in
scratch memory, and the difference between the instructions of two loops.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metal_emulator.assemble import ATTRIBUTES, Assembled, KernelSource, assemble
from metal_emulator.build import LANGUAGE_FLAGS, cache_directory, content_key
from metal_emulator.compiler import find_compiler
from metal_emulator.errors import MetalCompileError
from metal_emulator.rewrite import rewrite
from metal_emulator.tensors import Tensor

PROXY = Path(__file__).resolve().parent / "proxy" / "proxy.h"
TARGET = ("--target=amdgcn-amd-amdhsa", "-mcpu=gfx1100", "-nogpulib")
_FLAGS = (
    *(
        flag
        for flag in LANGUAGE_FLAGS
        if flag not in ("-fPIC", "-Wall", "-Wextra") and "vectorize" not in flag
    ),
    "-O3",
    "-w",
    "-ffp-contract=fast",
)
MAX_REGISTERS = 110
"""Limit of registers for the compiler, which spills further values to scratch memory. Apple's GPUs have at
most 128 registers per thread, and a core runs fewer threads if each takes more registers."""

_LIMITS = f'attributes #0 = {{ "amdgpu-num-vgpr"="{MAX_REGISTERS}" "amdgpu-flat-work-group-size"="1,512" '
_IDS = {
    "thread_index_in_simdgroup": "metal::msl_lane()",
    "simdgroup_index_in_threadgroup": "((uint)__builtin_amdgcn_readfirstlane(msl_linear / 32))",
    "thread_index_in_threadgroup": "msl_linear",
    "thread_position_in_grid": (
        "(metal::uint3{msl_group.x * WIDTH + msl_x, msl_group.y * HEIGHT + msl_y, msl_group.z})"
    ),
    "threadgroup_position_in_grid": "msl_group",
    "simdgroups_per_threadgroup": "(WIDTH * HEIGHT / 32)",
}
_KINDS = (
    ("load", re.compile(r"(?:global|flat|buffer)_load")),
    ("store", re.compile(r"(?:global|flat|buffer)_store")),
    ("shuffle", re.compile(r"ds_(?:bpermute|swizzle|permute)|v_permlane|_dpp")),
    ("threadgroup load", re.compile(r"ds_load|ds_read")),
    ("threadgroup store", re.compile(r"ds_store|ds_write")),
    ("matrix", re.compile(r"v_nop")),
    ("fma", re.compile(r"v_(?:dual_)?(?:fma|fmac|pk_fma|mul_f|add_f|sub_f|dot)")),
    ("vector", re.compile(r"v_")),
    ("scalar", re.compile(r"s_")),
)


@dataclass(frozen=True)
class Resources:
    """Resources of a kernel. ``loops`` has each loop's instructions by kind, without those of inner loops."""

    registers: int
    scratch_bytes: int
    threadgroup_bytes: int
    instructions: Counter[str]
    loops: tuple[Counter[str], ...] = field(default=())


def measure(
    source: KernelSource,
    inputs: Sequence[Any],
    output_dtypes: Sequence[Any],
    threadgroup: tuple[int, int, int],
) -> Resources:
    """Return a kernel's resources for a launch with these arguments. Raises MetalCompileError."""
    assembled = assemble(source, [Tensor.of(value) for value in inputs], output_dtypes)
    text = _compile(_unit(assembled, threadgroup))
    return Resources(
        registers=_number(text, r"; NumVgprs: (\d+)"),
        scratch_bytes=_number(text, r"; ScratchSize: (\d+)"),
        threadgroup_bytes=_number(text, r"; LDSByteSize: (\d+)"),
        instructions=sum((kinds for _, kinds in _blocks(text)), Counter()),
        loops=_loops(text),
    )


def has_target() -> bool:
    command = [*find_compiler().command, *TARGET, "-x", "c++", "-S", "-o", "-", "/dev/null"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _unit(assembled: Assembled, threadgroup: tuple[int, int, int]) -> str:
    parameters = ", ".join(
        f"{p.ctype}{'&' if p.is_reference else '*'} {p.name}" for p in assembled.parameters
    )
    unknown = [name for name in assembled.attributes if name not in _IDS]
    if unknown:
        raise MetalCompileError(f"kernel {assembled.source.name!r} uses {unknown}, which proxy/ has not")
    ids = "".join(
        f"  const {'metal::uint3' if ATTRIBUTES[name] == 'uint3' else 'uint'} {name} = {_IDS[name]};\n"
        for name in assembled.attributes
    )
    width, height, _ = threadgroup
    return (
        f'#include "{PROXY}"\n{rewrite(assembled.source.header)}\n'
        f"#define WIDTH {width}u\n#define HEIGHT {height}u\n"
        'extern "C" __attribute__((amdgpu_kernel)) '
        f"void msl_kernel({parameters}) {{\n"
        "  const uint msl_x = __builtin_amdgcn_workitem_id_x(), msl_y = __builtin_amdgcn_workitem_id_y();\n"
        "  const uint msl_linear = msl_y * WIDTH + msl_x;\n"
        "  const metal::uint3 msl_group = {__builtin_amdgcn_workgroup_id_x(), "
        "__builtin_amdgcn_workgroup_id_y(), __builtin_amdgcn_workgroup_id_z()};\n"
        f"  (void)msl_linear; (void)msl_group;\n{ids}{rewrite(assembled.source.body)}\n}}\n"
    )


def _compile(unit: str) -> str:
    target = cache_directory() / f"proxy-{content_key(unit, PROXY.read_text(), _LIMITS, *_FLAGS, *TARGET)}.s"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            source, made = Path(folder) / "kernel.cpp", Path(folder) / "kernel.s"
            source.write_text(unit)
            compiler = [*find_compiler().command, *TARGET]
            optimized = Path(folder) / "kernel.ll"
            _run([*compiler, *_FLAGS, "-S", "-emit-llvm", str(source), "-o", str(optimized)])
            optimized.write_text(optimized.read_text().replace("attributes #0 = {", _LIMITS, 1))
            _run([*compiler, "-O3", "-w", "-S", "-x", "ir", str(optimized), "-o", str(made)])
            made.rename(target)
    return target.read_text()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MetalCompileError(f"the kernel does not compile for {TARGET[0]}:\n{done.stderr[:4000]}")


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"the compiler's output has no {pattern!r}"
    return int(found[1])


def _blocks(text: str) -> list[tuple[str, Counter[str]]]:
    blocks: list[tuple[str, Counter[str]]] = [("", Counter())]
    for line in text.splitlines():
        if re.match(r"\.LBB\d+_\d+:|; %bb\.", line):
            blocks.append((line, Counter()))
        elif line.startswith("\t") and (word := line.split())[0][0] in "vsdgfb":
            kind = next((name for name, pattern in _KINDS if pattern.match(word[0])), None)
            if kind is not None:
                blocks[-1][1][kind] += 1
        elif re.match(r"\s+;", line) and not blocks[-1][1]:
            blocks[-1] = (blocks[-1][0] + line, blocks[-1][1])
        elif "; -- End function" in line:
            break
    return blocks


def _loops(text: str) -> tuple[Counter[str], ...]:
    loops: dict[str, Counter[str]] = {}
    for comment, kinds in _blocks(text):
        own = re.search(r"\.L(BB\d+_\d+):", comment)
        inside = re.search(r"in Loop: Header=(BB\d+_\d+)", comment)
        name = inside[1] if inside else own[1] if own and "Loop Header" in comment else None
        if name is not None:
            loops.setdefault(name, Counter()).update(kinds)
    return tuple(loops.values())
