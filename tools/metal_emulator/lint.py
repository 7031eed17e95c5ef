"""Rules of Metal's language that a C++ compiler does not enforce.

Source: the Metal Shading Language Specification, version 3.1.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from metal_emulator.assemble import KernelSource, assemble
from metal_emulator.build import LANGUAGE_FLAGS, cache_directory, precompiled_shim, run_compiler
from metal_emulator.compiler import find_compiler
from metal_emulator.errors import MetalCompileError
from metal_emulator.lint_ir import lint_ir
from metal_emulator.rewrite import THREADGROUP_DECLARATION, strip_comments, unit_source
from metal_emulator.tensors import Tensor

FORBIDDEN = {
    r"\bdouble\b": "double does not exist in Metal",
    r"\blong\s+long\b": "long long does not exist in Metal",
    r"\bgoto\b": "goto",
    r"\bvirtual\b": "virtual functions",
    r"\b(?:new|delete)\b": "new and delete",
    r"\bstd::": "std:: is not available",
    r"\b(?:try|catch|throw)\b": "exceptions",
    r"\b(?:dynamic_cast|typeid)\b": "run-time types",
    r"\bthread_local\b": "thread_local",
    r"\bprintf\s*\(": "printf",
    r"\bnoexcept\b": "noexcept",
    r"\{\s*\.\w+\s*=": "designated initialiser (C++20)",
    r"\basm\b": "inline assembly",
    r"\b__builtin_\w+": "a builtin of the host's compiler",
    r"\bu?long[34]\b|\bvec\s*<\s*u?long\s*,\s*[34]\s*>": "a vector of more than 16 bytes: not checked here",
}
_FLAGS = (
    *(flag for flag in LANGUAGE_FLAGS if flag not in ("-Wall", "-Wextra")),
    "-Wimplicit-float-conversion",
    "-O0",
    "-fno-sanitize=all",
    "-DMSL_NUMBERED",
)
_MEMBER_FUNCTION = re.compile(
    r"(?P<before>[;{}>]|public:|^)\s*(?P<declaration>(?:METAL_FUNC|inline)\s[^;{}()=]*?\b\w+\s*"
    r"\((?P<parameters>[^()]*(?:\([^()]*\)[^()]*)*)\)\s*(?P<after>[\w\s]*))\{",
    re.MULTILINE,
)
_STRUCT = re.compile(r"\b(?:struct|class)\s+\w+\s*\{")
_LAMBDA = re.compile(r"\[[&=\w\s,]*\]\s*(?:\([^()]*\))?\s*(?:mutable\s*)?(?:->\s*[\w:]+\s*)?\{")
_INCLUDE = re.compile(r"#\s*include\s*[<\"]([^>\"]+)")
_METAL_INCLUDE = re.compile(r"metal_|mlx/|simd/")
_SCOPE_OR_THREADGROUP = re.compile(r"[{}]|(?<!\w)threadgroup\s+[\w:<>, ]+\s+\w+\s*(?:\[[^;]*)?;")
_LOCAL_CONSTANT = re.compile(r"(?:^|[;{}])\s*constant\s+[\w:<>]+\s+\w+\s*(?:\[[^\]]*\]\s*)?=")
_TO_BFLOAT = re.compile(
    r"^([^\s:]*:\d+):\d+: warning: implicit conversion loses floating-point precision: "
    r"'([^']*)'[^\n]* to '[^']*(?:bfloat|__bf16)",
    re.MULTILINE,
)


def lint(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    *,
    header: str = "",
    inputs: Sequence[Any],
    output_dtypes: Sequence[Any],
    template: Sequence[tuple[str, Any]] | None = None,
    atomic_outputs: bool = False,
) -> list[str]:
    """Return messages about code that Metal would refuse."""
    kernel = KernelSource(name, tuple(input_names), tuple(output_names), source, header, atomic_outputs)
    findings = lint_text(header, source)
    try:
        assembled = assemble(kernel, [Tensor.of(value) for value in inputs], output_dtypes, template or ())
    except MetalCompileError as error:
        return [*findings, str(error)]
    findings += lint_unit(unit_source(assembled))
    return list(dict.fromkeys(findings))


def lint_text(header: str, body: str) -> list[str]:
    """Return messages about the kernel's text, as "header:line: ..." or "body:line: ..."."""
    findings = []
    for where, text in (("header", header), ("body", body)):  # MLX needs ASCII, also in comments
        for match in re.finditer(r"[^\x00-\x7F]", text):
            findings.append(f"{where}:{_line(text, match.start())}: {match[0]!r} is not ASCII")
    for position, name in _members_without_space(strip_comments(header)):
        findings.append(
            f"header:{_line(header, position)}: {name} does not say the address space of its object"
        )
    for where, text in (("header", strip_comments(header)), ("body", strip_comments(body))):
        for position, finding in _forbidden(text):
            findings.append(f"{where}:{_line(text, position)}: {finding}")
    for position in _threadgroup_in_header(strip_comments(header)):
        findings.append(f"header:{_line(header, position)}: threadgroup variable outside the kernel's body")
    for position in _threadgroup_in_scope(strip_comments(body)):
        findings.append(f"body:{_line(body, position)}: threadgroup variable in a nested scope")
    for match in _LOCAL_CONSTANT.finditer(strip_comments(body)):
        findings.append(f"body:{_line(body, match.end())}: constant variable in a function")
    return findings


def lint_unit(unit: str) -> list[str]:
    """Return messages about a translated unit, including compile errors."""
    flags = (*_FLAGS, *find_compiler().target_flags)
    prelude = precompiled_shim(flags)
    with tempfile.TemporaryDirectory(dir=cache_directory(), prefix="lint-") as folder:
        source, ir = Path(folder) / "kernel.cpp", Path(folder) / "kernel.ll"
        source.write_text(unit)
        try:
            arguments: list[str | Path] = ["-include-pch", prelude, "-S", "-emit-llvm", source, "-o", ir]
            said = run_compiler([*flags, *arguments], "")
        except MetalCompileError as error:
            errors = re.findall(r"error: (.*)", str(error))
            return [f"does not compile: {message}" for message in errors[:3]]
        findings = [f"{where}: implicit {kind} to bfloat" for where, kind in _TO_BFLOAT.findall(said)]
        return list(dict.fromkeys([*findings, *lint_ir(ir.read_text())]))


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _forbidden(text: str) -> Iterator[tuple[int, str]]:
    for pattern, finding in FORBIDDEN.items():
        for match in re.finditer(pattern, text):
            yield match.start(), finding
    for match in _LAMBDA.finditer(text):
        is_subscript = re.search(r"[\w\])]\s*$", text[: match.start()]) is not None
        is_attribute = text.startswith("[[", match.start())
        if not is_subscript and not is_attribute:
            yield match.start(), "lambda (not in Metal before version 4)"
    for match in _INCLUDE.finditer(text):
        if not _METAL_INCLUDE.match(match[1]):
            yield match.start(), f"#include <{match[1]}> is not a header of Metal"


def _members_without_space(text: str) -> Iterator[tuple[int, str]]:
    for struct in _STRUCT.finditer(text):
        depth, end = 1, struct.end()
        while end < len(text) and depth:
            depth += (text[end] == "{") - (text[end] == "}")
            end += 1
        for match in _MEMBER_FUNCTION.finditer(text, struct.end(), end):
            before = text[text.rfind("\n", 0, match.start("declaration")) + 1 : match.start("declaration")]
            if "static" in before.split() or re.search(r"\bthread\b", match["after"]):
                continue
            name = re.search(r"(\w+)\s*\($", match["declaration"][: match["declaration"].index("(") + 1])
            yield match.start("declaration"), name[1] if name else "a member"


def _threadgroup_in_header(text: str) -> Iterator[int]:
    for match in THREADGROUP_DECLARATION.finditer(text):
        if not re.search(r"[*&=]", match["declaration"]):
            yield match.start("declaration")


def _threadgroup_in_scope(text: str) -> Iterator[int]:
    depth = 0
    for match in _SCOPE_OR_THREADGROUP.finditer(text):
        if match[0] in "{}":
            depth += 1 if match[0] == "{" else -1
        elif depth:
            yield match.start()
