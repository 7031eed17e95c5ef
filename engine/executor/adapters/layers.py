from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

from ...api.errors import InvalidRequest, ModelLoadError
from ..adapt.output_head import SelectingHead
from ..overrides import adapt_module
from ..row_inputs import RowInputs
from .files import Factors

SLOTS = "adapters"  # row input: adapter slot of each row, int32 [T, 1, 1]
_LINEAR = (Linear, QuantizedLinear)
_SWITCH = (SwitchLinear, QuantizedSwitchLinear)
_ROUTED = (SwitchGLU, SwitchMLP)


class Table(Protocol):
    def made(self, factors: Factors, gain: mx.array | None, bias: mx.array | None) -> tuple[Any, int]: ...

    def put(self, slot: int, part: int, made: Any) -> None: ...

    def clear(self, slot: int) -> None: ...

    def add(self, ys: Sequence[mx.array], x: mx.array, slots: mx.array) -> Sequence[mx.array]: ...


class Shape(NamedTuple):
    experts: int
    outputs: int
    inputs: int


class Cut(Protocol):
    @property
    def of_inputs(self) -> bool: ...

    def __call__(self, factors: Factors) -> Factors: ...


class RankLayers(NamedTuple):
    """Layers of this rank. ``cuts`` take its parts of factors; ``elsewhere`` has other ranks' layers."""

    cuts: Mapping[str, Cut] = MappingProxyType({})
    elsewhere: Collection[str] = ()


class Layer(NamedTuple):
    module: Any
    shape: Shape
    table: Table
    part: int
    cut: Cut | None = None

    def own(self, path: str, factors: Factors) -> Factors:
        if self.cut is not None:
            factors = self.cut(factors)
        given = Shape(factors.a.shape[0], factors.b.shape[2], factors.a.shape[2])
        if given != self.shape:
            raise InvalidRequest(
                f"{path} must have factors of {self.shape}, got {given}; use an adapter of this model"
            )
        if factors.magnitude is not None and self.shape.experts > 1:
            raise InvalidRequest(f"{path} must have no magnitudes, got DoRA of experts; train LoRA instead")
        return factors

    def squares(self, factors: Factors) -> mx.array:
        weight = dequantized(self.module).astype(mx.float32)
        a, b = (each[0].astype(mx.float32) for each in (factors.a, factors.b))
        return mx.square(weight + (factors.scale * b.T) @ a).sum(axis=1)

    def made(self, factors: Factors, squares: mx.array | None = None) -> tuple[Any, int]:
        if factors.magnitude is None:
            return self.table.made(factors, None, None)
        norm = mx.sqrt(self.squares(factors) if squares is None else squares)
        gain = factors.magnitude.astype(mx.float32) / norm
        return self.table.made(factors, gain, self.module.get("bias"))


class MakeTable(Protocol):
    def __call__(self, shapes: list[Shape], dtype: mx.Dtype) -> Table: ...


class SharedInputAdapter:
    def __init__(self, members: Sequence[Any], table: Table) -> None:
        self.table = table
        self._compute = [partial(type(module).__call__, module) for module in members]
        self._input: mx.array | None = None
        self._outputs: dict[int, mx.array] = {}

    def output(self, index: int, x: mx.array, slots: mx.array) -> mx.array:
        if index not in self._outputs or not self._same_input(x):
            self._input = copy.copy(x)
            self._outputs = dict(enumerate(self.table.add([each(x) for each in self._compute], x, slots)))
        y = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        return y

    def _same_input(self, x: mx.array) -> bool:
        from octavo.kernels import _ext

        return self._input is not None and bool(_ext.same_array(self._input, x))


def adapt_layers(
    model: Module,
    rows: RowInputs,
    make_table: MakeTable,
    *,
    native: bool,
    groups: Sequence[Sequence[Any]] | None = None,
    cuts: Mapping[str, Cut],
) -> dict[str, Layer]:
    """Adapt every linear layer of ``model`` except the output head; return the layers by name."""
    layers: dict[str, Layer] = {}
    tables: dict[int, Table] = {}
    candidates = list(_candidates(model))
    if groups is not None:
        dense = {id(module): path for path, module in candidates if not isinstance(module, _SWITCH)}
        for group in [group for group in groups if all(id(module) in dense for module in group)]:
            shapes = [_shape(module) for module in group]
            together = SharedInputAdapter(group, make_table(shapes, _dtype(group[0])))
            for index, (module, shape) in enumerate(zip(group, shapes, strict=True)):
                path = dense[id(module)]
                _adapt(module, path, together.table, rows, _member, together=together, index=index)
                layers[path] = Layer(module, shape, together.table, index)
        candidates = [(path, module) for path, module in candidates if path not in layers]
    for path, module in candidates:
        shape = _shape(module)
        merged = getattr(module, "merged", None)
        if merged is None:
            table = make_table([shape], _dtype(module))
            _adapt(module, path, table, rows, _kind_of(module, native=native))
            layers[path] = Layer(module, shape, table, 0)
            continue
        if id(merged) not in tables:
            table = make_table([_shape(member) for member in merged.members], _dtype(module))
            _adapt(merged.whole, path, table, rows, _kind_of(merged.whole, native=native))
            tables[id(merged)] = table
        layers[path] = Layer(module, shape, tables[id(merged)], module.index)
    return {path: layer._replace(cut=cuts.get(path)) for path, layer in layers.items()}


def padded_bytes(model: Module, *, num_slots: int, max_rank: int, experts_only: bool) -> int:
    return 4 * (num_slots + 1) * max_rank * num_values(model, experts_only=experts_only)


def num_values(model: Module, *, experts_only: bool = False) -> int:
    kinds = _SWITCH if experts_only else (*_LINEAR, *_SWITCH)
    modules = (module for _, module in model.named_modules() if isinstance(module, kinds))
    return sum(s.experts * (s.inputs + s.outputs) for s in map(_shape, modules))


def _candidates(model: Module) -> Iterator[tuple[str, Any]]:
    modules = list(model.named_modules())
    heads = {id(module.inner) for _, module in modules if isinstance(module, SelectingHead)}
    routed = [module for _, module in modules if isinstance(module, _ROUTED)]
    experts = {id(child) for module in routed for child in module.children().values()}
    for module in routed:
        adapt_module(module, _route)
    for path, module in modules:
        of_experts = isinstance(module, _SWITCH) and id(module) in experts
        if of_experts or (isinstance(module, _LINEAR) and id(module) not in heads):
            yield path.removesuffix(".inner"), module


def _shape(module: Any) -> Shape:
    if isinstance(module, _SWITCH):
        return Shape(module.num_experts, module.output_dims, module.input_dims)
    if getattr(module, "merged", None) is not None:
        return Shape(1, module.span.stop - module.span.start, module.packed.inputs)
    if getattr(module, "packed", None) is not None:
        return Shape(1, module.packed.outputs, module.packed.inputs)
    outputs, inputs = module.weight.shape
    return Shape(1, outputs, inputs * 32 // module.bits if isinstance(module, QuantizedLinear) else inputs)


def _dtype(module: Any) -> mx.Dtype:
    packed = getattr(module, "packed", None)
    if packed is None:
        dtype: mx.Dtype = module.get("scales", module["weight"]).dtype
    else:
        dtype = (packed if hasattr(packed, "dtype") else packed.experts[0]).dtype
    return dtype if dtype == mx.bfloat16 else mx.float32


def dequantized(module: Any) -> mx.array:
    if not isinstance(module, QuantizedLinear):
        weight: mx.array = module.weight
        return weight
    return mx.dequantize(
        module.weight, module.scales, module.biases, group_size=module.group_size, bits=module.bits,
        mode=module.mode,
    )  # fmt: skip


def _adapt(module: Any, path: str, table: Table, rows: RowInputs, kind: Any, **more: object) -> None:
    adapt_module(module, kind, adapters=table, adapted_path=path, row_inputs=rows, **more)


def _kind_of(module: Any, *, native: bool) -> Any:
    if isinstance(module, _SWITCH):
        return _expert
    return _multiply if native and hasattr(module, "multiply") else _linear


def _check_rows(module: Any, x: mx.array, slots: mx.array) -> None:
    count = slots.shape[0]
    if x.shape[0] != count and x.size // x.shape[-1] != count:
        raise ModelLoadError(
            f"{module.adapted_path} must get {count} input rows to apply adapters, got shape "
            f"{list(x.shape)}; serve this model without --lora-modules, --lora-dir and --lora-memory"
        )


def _added(module: Any, y: mx.array, x: mx.array, slots: mx.array) -> mx.array:
    _check_rows(module, x, slots)
    (y,) = module.adapters.add([y], x, slots)
    return y


def _member(kind: Any) -> dict[str, Any]:
    def __call__(self: Any, x: mx.array) -> mx.array:
        slots = self.row_inputs.get(SLOTS)
        if slots is None:
            y: mx.array = kind.__call__(self, x)
            return y
        _check_rows(self, x, slots)
        together: SharedInputAdapter = self.together
        return together.output(self.index, x, slots)

    return {"__call__": __call__}


def _linear(kind: Any) -> dict[str, Any]:
    def __call__(self: Any, x: mx.array) -> mx.array:
        y: mx.array = kind.__call__(self, x)
        slots = self.row_inputs.get(SLOTS)
        if slots is not None:
            y = _added(self, y, x, slots)
        return y

    return {"__call__": __call__}


def _multiply(kind: Any) -> dict[str, Any]:
    def multiply(self: Any, x: mx.array, residual: mx.array | None = None) -> mx.array:
        y: mx.array
        slots = self.row_inputs.get(SLOTS)
        if slots is None:
            y = kind.multiply(self, x, residual)
            return y
        y = _added(self, kind.multiply(self, x), x, slots)
        return y if residual is None else y + residual

    return {"multiply": multiply}


def _route(kind: Any) -> dict[str, Any]:
    def __call__(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        experts = [child for child in self.children().values() if isinstance(child, _SWITCH)]
        slots = experts[0].row_inputs.get(SLOTS)
        if slots is not None:
            slots = slots.reshape(-1, *[1] * (indices.ndim - 1))
            indices = indices.astype(mx.int32) + slots * experts[0].num_experts
        y: mx.array = kind.__call__(self, x, indices)
        return y

    return {"__call__": __call__}


def _expert(kind: Any) -> dict[str, Any]:
    def __call__(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y: mx.array
        if self.row_inputs.get(SLOTS) is None:
            y = kind.__call__(self, x, indices, sorted_indices=sorted_indices)
            return y
        y = kind.__call__(self, x, indices % self.num_experts)
        (y,) = self.adapters.add([y], x, indices)
        return y

    return {"__call__": __call__}
