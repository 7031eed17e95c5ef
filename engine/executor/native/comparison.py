"""Comparison of each native module with the module that it replaces.

Inputs have heavy tails and rows of very different magnitudes, so that a mistake changes results far more
than rounding does. Inputs of linear layers are integers that 8-bit kernels represent exactly.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ...api.errors import ModelLoadError
from ..overrides import replaced
from .rope import NATIVE as ROPES

LIMITS = {mx.float32: 1e-4, mx.float16: 3 * 2.0**-11, mx.bfloat16: 3 * 2.0**-8}
"""Largest relative error by dtype."""

_NUM_OUTPUTS = 16
_POSITIONS = (0, 17, 2047, 300, 1)
_MANY = 40
_FAR = 100_000
_DENSE, _TABLES = (Linear, QuantizedLinear), (Embedding, QuantizedEmbedding)
_EXPERTS = (SwitchLinear, QuantizedSwitchLinear)


@dataclass(frozen=True, slots=True)
class Form:
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


Calls = Mapping[int, Sequence[Call]]
"""Different calls of each module, by module id."""


@contextmanager
def recorded(kinds: Iterable[type]) -> Iterator[dict[int, list[Call]]]:
    calls: dict[int, list[Call]] = {}

    def recording(kind: type, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if type(module) is kind:
                named = tuple((name, _form_of(value)) for name, value in kwargs.items())
                made = Call(method, tuple(map(_form_of, args)), named)
                known = calls.setdefault(id(module), [])
                if made not in known:
                    known.append(made)
            return original(module, *args, **kwargs)

        return call

    changes = [
        (kind, method, functools.partial(recording, kind, method))
        for kind in kinds
        for method in ("__call__", "as_linear")
        if method in vars(kind)
    ]
    with replaced(*changes):
        yield calls


def _form_of(value: Any) -> Any:
    return Form(tuple(value.shape), value.dtype) if isinstance(value, mx.array) else value


@dataclass(frozen=True, slots=True)
class _Case:
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wanted: mx.array
    dtype: mx.Dtype
    limit: float
    floor: float
    outputs: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    name: str
    type: str
    cases: tuple[_Case, ...]


@dataclass(slots=True)
class Comparison:
    calls: Calls = field(default_factory=dict)
    _shapes: set[Any] = field(default_factory=set)
    _found: list[tuple[str, mx.array, _Case]] = field(default_factory=list)

    def expect(self, *named: tuple[str, Any]) -> list[Expected]:
        found, now = [], []
        for name, module in named:
            kind = type(module)
            calls = _different(self.calls.get(id(module), ())) or _usual_calls(module)
            has_products = kind in _DENSE or kind in _EXPERTS or kind in _TABLES
            if has_products and (shape := (kind, *module["weight"].shape)) not in self._shapes:
                self._shapes.add(shape)
                lookup = "__call__" if kind in _TABLES else None
                of_experts = kind in _EXPERTS
                calls += [
                    _with_many_rows(call, of_experts=of_experts) for call in calls if call.method != lookup
                ]
            cases = tuple(case for call in calls for case in _cases(module, call))
            if has_products:
                now += [case.wanted for case in cases]
            found.append(Expected(name, kind.__name__, cases))
        mx.eval(now)
        return found

    def meet(self, expected: Expected, module: Any) -> None:
        for case in expected.cases:
            label = f"layer {expected.name} ({expected.type})"
            try:
                got = getattr(type(module), case.method)(module, *case.args, **case.kwargs)
            except Exception as error:
                raise ModelLoadError(f"native {label} fails where mlx-lm's does not: {error}") from error
            self.compare(label, got, case)

    def meet_functions(self, functions: Iterable[tuple[str, Any]]) -> None:
        for name, ours in functions:
            for dtype, limit in LIMITS.items():
                args, kwargs = _arguments(name, dtype)
                wide = [arg.astype(mx.float32) for arg in args]
                wanted = mx.stack([*map(mx.array, _as_list(ours.original(*wide, **kwargs)))])
                got = mx.stack(_as_list(ours(*args, **kwargs)))
                self.compare(
                    f"function {name}", got, _Case("", tuple(args), kwargs, wanted, dtype, limit, 0.05)
                )

    def compare(self, label: str, got: mx.array, case: _Case) -> None:
        if case.outputs is not None:
            got = mx.take(got, case.outputs, axis=-1)
        given = case.args[0].dtype
        if got.shape != case.wanted.shape or got.dtype not in (case.dtype, given):
            raise ModelLoadError(
                f"native {label} must return {case.dtype} of shape {list(case.wanted.shape)} as mlx-lm's "
                f"does, got {got.dtype} of shape {list(got.shape)}; load the model with --backend reference"
            )
        self._found.append((label, got, case))

    def check(self) -> None:
        """Raise ModelLoadError if a layer's results differ from mlx-lm's."""
        mx.eval([(got, case.wanted) for _, got, case in self._found])
        for label, got, case in reversed(self._found):
            error = _error(got, case)
            if not error <= case.limit:  # also true for NaN
                raise ModelLoadError(
                    f"native {label} must compute what mlx-lm's does within {case.limit:.2g}, got a "
                    f"difference of {error:.2g}; load the model with --backend reference"
                )
        self._found.clear()


def _different(calls: Sequence[Call]) -> list[Call]:
    most: dict[Any, tuple[int, Call]] = {}
    for call in calls:
        arrays = [value for value in (*call.args, *dict(call.kwargs).values()) if isinstance(value, Form)]
        rows = max((value.size // max(value.shape[-1], 1) for value in arrays if value.shape), default=0)
        rotated = arrays[0].shape[-2] > 1 if len(arrays[0].shape) == 4 else False
        kind = (
            call.method,
            rotated,
            tuple((len(value.shape), value.shape[-1:], value.dtype) for value in arrays),
        )
        if kind not in most or rows > most[kind][0]:
            most[kind] = (rows, call)
    return [call for _, call in most.values()]


def _with_many_rows(call: Call, *, of_experts: bool) -> Call:
    def many(form: Form) -> Form:
        rest = form.shape[1:] if of_experts or len(form.shape) > 1 else form.shape
        return Form((_MANY, *rest), form.dtype)

    forms = (many(arg) if isinstance(arg, Form) else arg for arg in call.args)
    return Call(call.method, tuple(forms), call.kwargs)


def _as_list(given: Any) -> list[mx.array]:
    return list(given) if isinstance(given, tuple) else [given]


def _arguments(name: str, dtype: mx.Dtype) -> tuple[list[mx.array], dict[str, Any]]:
    heavy = _heavy_rows((3, 160), 1.0, 1) / 8
    around = np.sinh(np.linspace(-5, 5, 160, dtype=np.float32))
    count = {"swiglu": 2, "precise_swiglu": 3, "normalize_qk": 2}.get(name, 1)
    rows = [np.stack([np.roll(around, 37 * i), np.roll(heavy[0], i)])[None, :, None] for i in range(count)]
    kwargs = {"inv_scale": 0.3, "eps": 1e-2} if name == "normalize_qk" else {}
    return [mx.array(row).astype(dtype) for row in rows], kwargs


def _error(found: mx.array, case: _Case) -> float:
    got, wanted = (np.array(values.astype(mx.float32)) for values in (found, case.wanted))
    row = np.sqrt(np.mean(wanted * wanted, axis=-1, keepdims=True))
    return float((np.abs(got - wanted) / (np.abs(wanted) + case.floor * row + 1e-30)).max())


def _usual_calls(module: Any) -> list[Call]:
    kind = type(module)
    dtype = module.get("scales", module.get("weight", mx.array(0.0))).dtype
    dtype = dtype if dtype in LIMITS else mx.bfloat16
    if kind in _TABLES:
        return [Call("__call__", (Form((3, 1), mx.int32),))]
    if kind in _DENSE or kind in _EXPERTS:
        size = _num_inputs(module)
        if kind in _DENSE:
            return [Call("__call__", (Form((3, 1, size), dtype),))]
        return [Call("__call__", (Form((3, 1, 1, 1, size), dtype), Form((3, 1, 2), mx.uint32)))]
    if kind in ROPES:
        size = getattr(module, "dims", None) or module.dim
        return [Call("__call__", (Form((3, 2, 1, size), mx.float32),))]
    if "weight" not in module:
        return [Call("__call__", (Form((3, 1, 64), mx.float32),))]
    row = Form((3, 1, module["weight"].size), dtype)
    takes_gate = "gate" in kind.__call__.__code__.co_varnames
    return [Call("__call__", (row, row) if takes_gate else (row,))]


def _num_inputs(module: Any) -> int:
    size = int(module["weight"].shape[-1])
    return size * 32 // module.bits if "scales" in module else size


def _cases(module: Any, call: Call) -> Iterator[_Case]:
    kind = type(module)
    if kind in _TABLES and call.method == "__call__":
        yield _lookup(module, call)
    elif kind in _DENSE or kind in _EXPERTS or kind in _TABLES:
        yield _product(module, call)
    elif kind in ROPES:
        yield from _rotations(module, call)
    else:
        yield from _rows(module, call)


def _lookup(module: Any, call: Call) -> _Case:
    (ids, *rest) = call.args
    count, dtype = module["weight"].shape[0], module(mx.zeros((1,), mx.int32)).dtype
    chosen = np.random.default_rng(0).integers(0, count, ids.shape).astype(np.int32)
    chosen.flat[0] = count - 1
    rows = mx.array(chosen.reshape(-1))
    twin = _twin(module, lambda array: _wide(mx.take(array, rows, axis=0)))
    places = mx.arange(chosen.size).reshape(chosen.shape)
    wanted = type(module).__call__(twin, places, *rest)
    return _Case(call.method, (mx.array(chosen), *rest), dict(call.kwargs), wanted, dtype, LIMITS[dtype], 1.0)


def _product(module: Any, call: Call) -> _Case:
    kind, (x, *rest) = type(module), call.args
    args: list[Any] = [mx.array(_integers(x.shape)).astype(x.dtype)]
    if rest and isinstance(rest[0], Form):
        experts = np.random.default_rng(0).integers(0, module["weight"].shape[0], rest[0].shape)
        args.append(mx.array(np.sort(experts, axis=None).reshape(experts.shape)).astype(rest[0].dtype))
        rest = rest[1:]
    args += rest
    axis = module["weight"].ndim - 2
    outputs = mx.array(_sampled(module["weight"].shape[axis]))
    twin = _twin(module, lambda array: mx.take(array, outputs, axis=axis))
    if "bias" in module:
        twin["bias"] = mx.take(module["bias"], outputs, axis=-1)
    own = getattr(kind, call.method)
    wide = args[0].astype(mx.float32)
    if kind in (QuantizedLinear, QuantizedEmbedding):
        wanted = _dequantized_product(twin, wide)
    else:
        wanted = own(twin, wide, *args[1:], **dict(call.kwargs))
    dtype = own(twin, *args, **dict(call.kwargs)).dtype
    limit = max(LIMITS[dtype], LIMITS[x.dtype])
    return _Case(call.method, tuple(args), dict(call.kwargs), wanted, dtype, limit, 1.0, outputs)


def _twin(module: Any, change: Callable[[mx.array], mx.array]) -> Any:
    twin = copy.copy(module)
    for name in ("weight", "scales", "biases"):
        if isinstance(module.get(name), mx.array):
            twin[name] = change(module[name])
    return twin


def _wide(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


def _dequantized_product(module: Any, x: mx.array) -> mx.array:
    wide: dict[str, Any] = {
        name: _wide(module[name]) for name in ("scales", "biases") if module.get(name) is not None
    }
    settings = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    weight = mx.dequantize(module["weight"], **wide, **settings).astype(mx.float32)
    product: mx.array = x @ weight.T + module.get("bias", mx.array(0.0))
    return product


@functools.cache
def _sampled(count: int) -> Any:
    edges = np.linspace(0, count, min(count, _NUM_OUTPUTS) + 1).astype(np.int64)
    chosen = np.random.default_rng(count).integers(edges[:-1], edges[1:])
    chosen[0], chosen[-1] = 0, count - 1
    return chosen.astype(np.int32)


def _rotations(module: Any, call: Call) -> Iterator[_Case]:
    x, *rest = call.args
    named = {name: value for name, value in call.kwargs if name != "offset"}
    if named or len(rest) > 1:
        return
    values = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
    positions = np.resize(np.array(_POSITIONS, np.int32), x.shape[0])
    offsets: list[tuple[mx.Dtype, Any, float]] = [(mx.float32, _POSITIONS[1], 0.0)]
    if len(x.shape) == 4 and x.shape[2] == 1:
        offsets = [(dtype, mx.array(positions), 1e-3) for dtype in dict.fromkeys((mx.float32, x.dtype))]
        offsets.append((mx.float32, mx.array(positions + _FAR), 0.05))
    for dtype, offset, angle in offsets:
        rows = mx.array(values).astype(dtype)
        wanted = module(rows.astype(mx.float32), offset=offset)
        yield _Case("__call__", (rows,), {"offset": offset}, wanted, dtype, LIMITS[dtype] + angle, 2.0)


def _rows(module: Any, call: Call) -> Iterator[_Case]:
    first = call.args[0]
    for dtype in dict.fromkeys((first.dtype, mx.float32)):
        small = float(module.eps) ** 0.5 if dtype != mx.float16 else 0.1
        args = [
            mx.array(_heavy_rows(form.shape, small if index == 0 else 1.0, index)).astype(dtype)
            if isinstance(form, Form)
            else form
            for index, form in enumerate(call.args)
        ]
        wide = [arg.astype(mx.float32) if isinstance(arg, mx.array) else arg for arg in args]
        wanted, given = module(*wide, **dict(call.kwargs)), module(*args, **dict(call.kwargs)).dtype
        yield _Case(call.method, tuple(args), dict(call.kwargs), wanted, given, LIMITS[dtype], 0.05)


@functools.lru_cache(maxsize=64)
def _heavy_rows(shape: tuple[int, ...], small: float, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    size = shape[-1]
    rows = rng.standard_t(3, (max(int(np.prod(shape[:-1])), 1), size))
    cuts = np.sort(rng.integers(0, size, 7))
    rows *= 2.0 ** rng.uniform(-3, 3, 8)[np.searchsorted(cuts, np.arange(size), side="right")]
    rows[1::3] *= small / np.sqrt(np.mean(rows[1::3] ** 2, axis=-1, keepdims=True))
    rows[2::3] = 0
    return np.clip(rows, -200, 200).reshape(shape).astype(np.float32)


@functools.lru_cache(maxsize=64)
def _integers(shape: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(0)
    size = shape[-1]
    rows = np.clip(np.rint(rng.standard_t(2, (max(int(np.prod(shape[:-1])), 1), size)) * 6), -127, 127)
    rows[:, ::32] = 127 * rng.choice([-1, 1], rows[:, ::32].shape)
    rows[:, 1::2] = -np.copysign(rows[:, 1::2], rows[:, : size - size % 2 : 2])
    rows[1::3] /= 256
    rows[2::3] = 0
    return rows.reshape(shape).astype(np.float32)
