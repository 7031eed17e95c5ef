"""Computation of a recurrent layer's cut points; see cut_points.py.

A cut point is computed by a kernel on all rows of a step. Without one, the model's own operations compute it
group by group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..overrides import Call
from .cut_points import FUNCTIONS, SCAN, CutPoint
from .mamba_scan import Inputs, process_rows, selective_scan
from .mixers import Mixer, MixerError
from .recurrences import Advance
from .segments import SegmentGroup

if TYPE_CHECKING:
    from .recurrent_layers import RecurrentLayers

Compute = Callable[[SegmentGroup, Any, Callable[[Any], Any]], tuple[mx.array, mx.array]]
"""Function (group, states before it, conversion of arguments) -> (y [B, S, ..], states after it)."""


class Cuts:
    def __init__(self, layers: RecurrentLayers, mixer: Mixer) -> None:
        self._layers, self._mixer = layers, mixer
        self.is_active = False
        self.num_shifted = 0

    def catch(
        self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._function(f"{self._mixer.name}.{name}", name, plain, FUNCTIONS[name], args, kwargs)

    def method(self, name: str, plain: Call, cut: CutPoint) -> Call:
        def call(module: Module, *args: Any, **kwargs: Any) -> Any:
            bound = functools.partial(plain, module)
            return self._function(name, name.rsplit(".", 1)[-1], bound, cut, args, kwargs)

        return self._if_active(plain, call)

    def child(self, name: str, plain: Call, cut: CutPoint) -> Call:
        def call(module: Module, x: mx.array, cache: Any = None) -> Any:  # noqa: ARG001
            compute = self._grouped(functools.partial(plain, module), cut, (x,), {})
            return self._cut(name, self._layers.recurrences.child(module, x), compute), None

        return self._if_active(plain, call)

    def whole(self, name: str, plain: Call) -> Call:
        def call(module: Module, ids: mx.array, cache: Any = None) -> Any:
            if not hasattr(cache, "mute"):
                return plain(module, ids, cache)

            def compute(group: SegmentGroup, before: Any, _: Any) -> tuple[mx.array, mx.array]:
                state = [before]
                return plain(module, group.take(ids[:, 0]), state), state[0]

            return self._in_groups(name, compute)[:, None]

        return call

    def scanned(self, plain: Call, inputs: Inputs) -> Call:
        name = f"{self._mixer.name}.selective_scan"
        A: list[mx.array] = []

        def scan(*args: Any) -> Any:
            return self._function(name, "selective_scan", selective_scan, SCAN, args, {})

        def call(module: Any, x: mx.array, *_states: Any) -> Any:
            if not A:
                A.append(-mx.exp(module.A_log))
                mx.eval(A)
            return process_rows(module, inputs, x, A[0], scan), (None, None)

        return self._if_active(plain, call)

    def conv(self, name: str, conv: Any) -> Call:
        plain = type(conv).__call__
        keep = conv.weight.shape[1] - 1

        def call(module: Module, x: mx.array) -> Any:
            if x.shape[:2] != (1, keep + self._layers.step.num_rows):
                raise MixerError(f"a convolution over {x.shape}, not over the rows of the step")

            def compute(group: SegmentGroup, before: Any, convert: Any) -> tuple[mx.array, mx.array]:
                rows = convert(x)
                if before is None:
                    before = mx.zeros((len(group), keep, x.shape[-1]), rows.dtype)
                whole = mx.concatenate([before.astype(rows.dtype), group.take(rows[0, keep:])], axis=1)
                return plain(module, whole), mx.contiguous(whole[:, whole.shape[1] - keep :])

            return self._cut(name, self._layers.recurrences.conv_behind(module, x, keep), compute)

        return self._if_active(plain, call)

    def shift(self, name: str, plain: Call) -> Call:
        weights: dict[mx.Dtype, mx.array] = {}

        def call(module: Module, x: mx.array, state: Any) -> Any:  # noqa: ARG001
            if x.dtype not in weights:
                weights[x.dtype] = _each(mx.array([[1.0], [0.0]], x.dtype), x.shape[-1])

            def compute(group: SegmentGroup, before: Any, _: Any) -> tuple[mx.array, mx.array]:
                part = group.take(x[0])
                return plain(module, part, before), part[:, -1:]

            return self._cut(name, self._layers.recurrences.taps(x.squeeze(0), weights[x.dtype]), compute)

        return self._if_active(plain, call)

    def rope(self, plain: Call) -> Call:
        def call(module: Module, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            return plain(module, x.swapaxes(0, 2), *args, **kwargs).swapaxes(0, 2)

        return self._if_active(plain, call)

    def shifted_heads(self, plain: Call) -> Call:
        taps: dict[str, mx.array] = {}

        def call(module: Module, u: mx.array, weights: mx.array, state: Any = None) -> Any:  # noqa: ARG001
            name = f"{self._mixer.name}.side{self.num_shifted}"
            self.num_shifted += 1
            if name not in taps:
                taps[name] = _each(weights.reshape(-1, 2).T, u.shape[-1])

            def compute(group: SegmentGroup, before: Any, _: Any) -> tuple[mx.array, mx.array]:
                part = group.take(u.squeeze(2)).swapaxes(1, 2)
                return plain(module, part, weights, state=before).swapaxes(1, 2), part[:, :, -1:]

            advance = self._layers.recurrences.taps(u.reshape(u.shape[0], -1), taps[name])
            return self._cut(name, advance, compute).reshape(u.shape)

        return self._if_active(plain, call)

    def _if_active(self, plain: Call, ours: Call) -> Call:
        def call(module: Module, *args: Any, **kwargs: Any) -> Any:
            return (ours if self.is_active else plain)(module, *args, **kwargs)

        return call

    def _function(
        self,
        name: str,
        function: str,
        plain: Call,
        cut: CutPoint,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        advance = self._layers.recurrences.function(function, args, kwargs)
        return self._cut(name, advance, self._grouped(plain, cut, args, kwargs), cut.axis), None

    def _cut(self, name: str, advance: Advance | None, compute: Compute, axis: int = 1) -> mx.array:
        def by_model(name: str) -> mx.array:
            return self._in_groups(name, compute)[None].swapaxes(1, axis)

        if advance is None:
            return by_model(name)
        found = self._layers.pool.advance(name, advance, self._layers.recurrences.kernels)
        self._layers.compare(name, found, lambda: by_model(""))
        return found

    def _in_groups(self, name: str, compute: Compute) -> mx.array:
        """Compute the step's rows [T, ..]; without a name, in float32 and without states."""
        step, pool = self._layers.step, self._layers.pool
        outputs = []
        for group in step.groups:
            before = pool.read(name, group) if name else None
            y, after = compute(group, before, _as_is if name else _wide)
            if name:
                pool.write(name, group, after)
            outputs.append(y)
        return step.join(outputs)

    def _grouped(self, plain: Call, cut: CutPoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compute:
        num_rows = self._layers.step.num_rows

        def compute(group: SegmentGroup, before: Any, convert: Any) -> tuple[mx.array, mx.array]:
            def part(value: Any) -> Any:
                value = convert(value)
                if not isinstance(value, mx.array) or value.ndim < 3 or value.shape[0] != 1:
                    return value
                if value.shape[cut.axis] != num_rows:
                    return value
                return group.take(value.swapaxes(1, cut.axis)[0]).swapaxes(1, cut.axis)

            given = list(map(part, args))
            named = {key: part(value) for key, value in kwargs.items() if key != cut.state}
            if len(given) > cut.position:
                given[cut.position] = before
            else:
                named[cut.state] = before
            y, after = plain(*given, **named)
            return y.swapaxes(1, cut.axis), after

        return compute


def _as_is(value: Any) -> Any:
    return value


def _wide(value: Any) -> Any:
    floats = isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)
    return value.astype(mx.float32) if floats else value


def _each(weights: mx.array, times: int) -> mx.array:
    wide = mx.contiguous(mx.repeat(weights, times, axis=1))
    mx.eval(wide)
    return wide
