"""Rewrites those parts of Metal's text for clang's C++ that macros cannot translate.

The shim (shim/metal.h) turns the rest of the language into C++. Lines keep their numbers, so that every
message names a line of the kernel's source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from metal_emulator.assemble import ATTRIBUTES, Assembled

# A declaration of threadgroup memory, at the start of a statement.
THREADGROUP_DECLARATION = re.compile(
    r"(?P<before>(?:^|[;{}])\s*)threadgroup\s+(?P<declaration>[^;(){}]*?);", re.DOTALL
)
_TYPE_AND_VARIABLES = re.compile(
    r"(?P<type>(?:alignas\([^)]*\)\s*)?[\w:]+(?:\s*<[^;]*>)?)\s+(?P<variables>[A-Za-z_]\w*.*)$", re.DOTALL
)
_VECTOR = r"(?:metal::)?(?:vec\s*<[^;{}]*>|(?:float|half|bfloat|u?char|u?short|u?int|u?long)[234])"
_VECTOR_START = re.compile(r"(?<![\w:])(?:metal::)?vec\s*<")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def strip_comments(source: str) -> str:
    """Return the text with blanks in place of comments; all other characters keep their positions."""
    return _COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment[0]), source)


def rewrite(source: str) -> str:
    """Return Metal source as C++ for clang."""
    source = strip_comments(source)
    source = re.sub(r"\[\[\s*threadgroup\(\d+\)\s*\]\]", "", source)
    source = re.sub(r"\btemplate\s*\[\[host_name[^;]*;", "", source)
    previous = ""
    while previous != source:
        previous, source = source, THREADGROUP_DECLARATION.sub(_threadgroup_variables, source)
    return _alias_constructors(_vector_constructors(source))


def _threadgroup_variables(match: re.Match[str]) -> str:
    declaration = match["declaration"].strip()
    parts = _TYPE_AND_VARIABLES.match(declaration)
    if parts is None or "=" in declaration:
        return match[0]
    variables = ""
    for variable in _split_at_commas(parts["variables"]):
        name = re.match(r"[A-Za-z_]\w*", variable)
        if name is None:
            return match[0]
        dimensions = variable[name.end() :]
        variables += f"typedef {parts['type']} msl_type_{name[0]}{dimensions}; MSL_THREADGROUP({name[0]}); "
    lost_lines = match[0].count("\n") - match["before"].count("\n") - variables.count("\n")
    return match["before"] + variables + "\n" * lost_lines


def _split_at_commas(text: str) -> Iterator[str]:
    depth, start = 0, 0
    for i, character in enumerate(text):
        depth += (character in "[<(") - (character in "]>)")
        if character == "," and depth == 0:
            yield text[start:i].strip()
            start = i + 1
    yield text[start:].strip()


def _vector_constructors(source: str) -> str:
    position = 0
    while (start := _VECTOR_START.search(source, position)) is not None:
        end, depth = start.end(), 1
        while end < len(source) and depth:
            depth += (source[end] == "<") - (source[end] == ">")
            end += 1
        if re.match(r"\s*\((?!\s*[*&])", source[end:]):
            made = f"msl_make<{source[start.start() : end]}>"
            source = source[: start.start()] + made + source[end:]
            position = start.start() + len(made)
        else:
            position = end
    return source


def _alias_constructors(source: str) -> str:
    aliases = set(re.findall(r"\btypedef\s+" + _VECTOR + r"\s+(\w+)\s*;", source))
    aliases |= set(re.findall(r"\busing\s+(\w+)\s*=\s*" + _VECTOR + r"\s*;", source))
    for alias in sorted(aliases):
        source = re.sub(rf"(?<![\w.:]){alias}\s*\((?!\s*[*&])", f"msl_make<{alias}>(", source)
    return source


def unit_source(assembled: Assembled) -> str:
    arguments = [
        f"{'*' if parameter.is_reference else ''}({parameter.ctype}*)buffers[{i}]"
        for i, parameter in enumerate(assembled.parameters)
    ]
    for attribute in assembled.attributes:
        if ATTRIBUTES[attribute] == "uint3":
            components = ", ".join(f"ids->{attribute}[{axis}]" for axis in range(3))
            arguments.append(f"metal::uint3{{{components}}}")
        else:
            arguments.append(f"ids->{attribute}")
    return (
        f'#line 1 "header"\n{rewrite(assembled.source.header)}\n'
        f'#line 1 "signature"\n{assembled.signature}\n'
        f'#line 1 "{assembled.source.name}"\n{rewrite(assembled.source.body)}\n}}\n'
        'extern "C" MSL_UNCHECKED void msl_entry(void* const* buffers, const MslIds* ids) {\n'
        f"  {assembled.kernel_name}{assembled.instantiation}({', '.join(arguments)});\n}}\n"
    )
