"""The text that `mx.fast.metal_kernel` builds around a kernel's body.

The format follows MLX's mlx/backend/common/metal_kernel.cpp (0.32.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from metal_emulator.errors import MetalCompileError
from metal_emulator.tensors import METAL_TYPES, Tensor, dtype_name

MAX_CONSTANT_ELEMENTS = 8  # an input of fewer elements is in `constant` memory, not in `device` memory
MAX_BUFFERS = 31  # the most buffers that Metal binds to one kernel

ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

Role = Literal["input", "shape", "strides", "ndim", "output"]


@dataclass(frozen=True)
class KernelSource:
    """Constructor arguments of `mx.fast.metal_kernel`."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    body: str
    header: str = ""
    atomic_outputs: bool = False


@dataclass(frozen=True)
class Parameter:
    """A buffer in the signature; `tensor` names its input or output."""

    role: Role
    tensor: str
    ctype: str
    is_reference: bool
    name: str

    def declaration(self, index: int) -> str:
        return f"  {self.ctype}{'&' if self.is_reference else '*'} {self.name} [[buffer({index})]]"


@dataclass(frozen=True)
class Assembled:
    text: str
    source: KernelSource
    kernel_name: str
    signature: str
    instantiation: str  # "<half, 128>", empty without a template
    parameters: tuple[Parameter, ...]
    attributes: tuple[str, ...]


def assemble(
    source: KernelSource,
    inputs: Sequence[Tensor],
    output_dtypes: Sequence[Any],
    template: Sequence[tuple[str, Any]] = (),
) -> Assembled:
    for what, names, given in (
        ("inputs", source.input_names, inputs),
        ("output_dtypes", source.output_names, output_dtypes),
    ):
        if len(names) != len(given):
            raise MetalCompileError(
                f"kernel {source.name!r} names {len(names)} {what}, {len(given)} were given"
            )
    instantiation = f"<{', '.join(_template_value(v) for _, v in template)}>" if template else ""
    name = _kernel_name(source.name, instantiation, inputs, output_dtypes)
    parameters = _input_parameters(source, inputs) + _output_parameters(source, output_dtypes)
    if len(parameters) > MAX_BUFFERS:
        raise MetalCompileError(
            f"kernel {source.name!r} has {len(parameters)} buffers: Metal binds at most {MAX_BUFFERS}"
        )
    attributes = tuple(a for a in ATTRIBUTES if a in source.body)
    lines = [parameter.declaration(i) for i, parameter in enumerate(parameters)]
    lines += [f"  {ATTRIBUTES[a]} {a} [[{a}]]" for a in attributes]
    signature = _template_line(template) + f"[[kernel]] void {name}(\n" + ",\n".join(lines) + ") {\n"
    tail = "\n}\n"
    if template:
        instance = f"{name}{instantiation}"
        tail += f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({instance}) {instance};\n'
    text = source.header + signature + source.body + tail
    return Assembled(text, source, name, signature, instantiation, tuple(parameters), attributes)


def _template_value(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool | int) else METAL_TYPES[dtype_name(value)]


def _template_line(template: Sequence[tuple[str, Any]]) -> str:
    if not template:
        return ""
    parameters = []
    for name, value in template:
        kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "typename"
        parameters.append(f"{kind} {name}")
    return f"template <{', '.join(parameters)}>\n"


def _kernel_name(
    name: str, instantiation: str, inputs: Sequence[Tensor], output_dtypes: Sequence[Any]
) -> str:
    parts = [f"custom_kernel_{name}"]
    if instantiation:
        for before, after in (("<", "_"), (">", ""), ("-", "_"), (", ", "_")):
            instantiation = instantiation.replace(before, after)
        parts.append(instantiation)
    for tensor in inputs:
        suffix = "s" if tensor.ndim == 0 else "c" if tensor.size < MAX_CONSTANT_ELEMENTS else ""
        parts.append(METAL_TYPES[tensor.dtype] + suffix)
    parts += [METAL_TYPES[dtype_name(dtype)] for dtype in output_dtypes]
    return "_".join(parts)


def _input_parameters(source: KernelSource, inputs: Sequence[Tensor]) -> list[Parameter]:
    parameters: list[Parameter] = []
    for name, tensor in zip(source.input_names, inputs, strict=True):
        space = "constant" if tensor.size < MAX_CONSTANT_ELEMENTS else "device"
        ctype = f"const {space} {METAL_TYPES[tensor.dtype]}"
        parameters.append(Parameter("input", name, ctype, tensor.ndim == 0, name))
        if tensor.ndim == 0:
            continue
        layout: tuple[tuple[Role, str, bool], ...] = (
            ("shape", "const constant int", False),
            ("strides", "const constant int64_t", False),
            ("ndim", "const constant int", True),
        )
        for role, layout_type, is_reference in layout:
            if f"{name}_{role}" in source.body:
                parameters.append(Parameter(role, name, layout_type, is_reference, f"{name}_{role}"))
    return parameters


def _output_parameters(source: KernelSource, output_dtypes: Sequence[Any]) -> list[Parameter]:
    parameters: list[Parameter] = []
    for name, dtype in zip(source.output_names, output_dtypes, strict=True):
        element = METAL_TYPES[dtype_name(dtype)]
        ctype = f"device atomic<{element}>" if source.atomic_outputs else f"device {element}"
        parameters.append(Parameter("output", name, ctype, False, name))
    return parameters
