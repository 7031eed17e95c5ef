"""Checks of a kernel's LLVM IR, compiled without optimisation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_FUNCTION = re.compile(r'^define[^@\n]*@"?([\w.$]+)"?\(.*?\{\n(.*?)^\}', re.DOTALL | re.MULTILINE)
_CALLEE = re.compile(r'\bcall\b[^@\n]*@"?([\w.$]+)"?\(')
_GLOBAL = re.compile(
    r"^@([\w.$]+) = (?!private)(?:\w+ )*?(addrspace\(\d\) )?(global|constant) ", re.MULTILINE
)
# Mangled names of the shim's functions; findings in them are not the kernel's fault.
_OF_SHIM = re.compile(r"_ZN?K?5metal|_Z\w*msl_|msl_|_Zli|_ZNK?5metal")
_GLOBAL_OF_SHIM = re.compile(r"_ZN5metal|_ZT[VISs]|_ZN6Limits|_ZGV|llvm\.")
_ALLOWED_CALLEE = re.compile(
    r"llvm\.|msl_rt_|__trunc|"
    r"(?:f?abs|sqrt|exp2?|log(?:2|10)?|pow|sin|cos|tan|tanh|sinh|cosh|a(?:sin|cos|tan)h?|atan2|"
    r"fm(?:od|in|ax|a)|nextafter|rint|round|trunc|floor|ceil|ldexp|copysign)f?$"
)
_IN_FUNCTION = {
    r"\bcall\b[^@\n]*%[\w.]+\(": "call through a pointer",
    r"=\s*addrspacecast\b": "cast between address spaces",
    r"\b(?:f(?:add|sub|mul|div|rem|neg|cmp \w+) double|to double)\b": "arithmetic in double",
    r"alloca [^,\n]+, i(?:64|32) %": "variable-length array",
}


@dataclass(frozen=True)
class _Function:
    name: str
    body: str
    callees: frozenset[str]

    @property
    def is_kernels(self) -> bool:
        return self.name != "msl_entry" and not _OF_SHIM.match(self.name)


def lint_ir(ir: str) -> list[str]:
    functions = {
        name: _Function(name, body, frozenset(_CALLEE.findall(body))) for name, body in _FUNCTION.findall(ir)
    }
    findings = []
    for function in functions.values():
        if function.is_kernels:
            findings += list(_in_function(function, functions))
    return findings + list(_in_globals(ir))


def _in_function(function: _Function, functions: Mapping[str, _Function]) -> Iterator[str]:
    for pattern, finding in _IN_FUNCTION.items():
        if re.search(pattern, function.body):
            yield f"{finding} in {_readable(function.name)}"
    for callee in sorted(function.callees):
        if callee not in functions and not _ALLOWED_CALLEE.match(callee):
            yield f"call of a host function: {callee}"
    if _reaches_itself(function, functions):
        yield f"recursion in {_readable(function.name)}"


def _reaches_itself(function: _Function, functions: Mapping[str, _Function]) -> bool:
    seen: set[str] = set()
    to_visit = [function.name]
    while to_visit:
        visited = functions.get(to_visit.pop())
        for callee in visited.callees - seen if visited else ():
            if callee == function.name:
                return True
            seen.add(callee)
            to_visit.append(callee)
    return False


def _in_globals(ir: str) -> Iterator[str]:
    for name, address_space, kind in _GLOBAL.findall(ir):
        if name.startswith("_ZTV"):
            yield "virtual functions"
        elif _GLOBAL_OF_SHIM.match(name):
            continue
        elif kind == "global":
            yield f"mutable program-scope or static variable {_readable(name)}"
        elif not address_space and name.startswith("_ZL"):
            yield f"program-scope constant {_readable(name)} is not in the constant address space"


def _readable(mangled: str) -> str:
    return re.sub(r"_Z[NKL]*\d*", "", mangled)[:40]
