"""Computation of a recurrent layer's cut points; see cut_points.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from .call_override import Call
from .cut_points import FUNCTIONS, SCAN, CutPoint
from .mamba_scan import Inputs, process_rows, selective_scan
from .mixers import Mixer, MixerError
from .recurrences import Advance
from .segments import SegmentGroup

if TYPE_CHECKING:
    from .recurrent_layers import RecurrentLayers


class Cuts:
    def __init__(self, layers: RecurrentLayers, mixer: Mixer) -> None:
        self._layers, self._mixer = layers, mixer
        self.is_active = False
        self.num_shifted = 0

    def catch(
        self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if (recurrences := self._layers.recurrences) is not None:
            advance = recurrences.function(name, args, kwargs)
            if advance is not None:
                by_mlx_lm = functools.partial(self._in_groups, "", plain, FUNCTIONS[name], args, kwargs)
                return self._advance(f"{self._mixer.name}.{name}", advance, lambda: by_mlx_lm()[0]), None
        return self._in_groups(f"{self._mixer.name}.{name}", plain, FUNCTIONS[name], args, kwargs)

    def _advance(self, name: str, advance: Advance, by_mlx_lm: Callable[[], mx.array]) -> mx.array:
        recurrences = self._layers.recurrences
        assert recurrences is not None
        found = self._layers.pool.advance(name, advance, recurrences.kernels)
        self._layers.compare(name, found, by_mlx_lm)
        return found

    def method(self, name: str, plain: Call, cut: CutPoint) -> Call:
        def call(module: Module, *args: Any, **kwargs: Any) -> Any:
            if not self.is_active:
                return plain(module, *args, **kwargs)

            def in_groups(name: str) -> Any:
                return self._in_groups(name, functools.partial(plain, module), cut, args, kwargs)

            if (recurrences := self._layers.recurrences) is not None:
                advance = recurrences.function(name.rsplit(".", 1)[-1], args, kwargs)
                if advance is not None:
                    return self._advance(name, advance, lambda: in_groups("")[0]), None
            return in_groups(name)

        return call

    def child(self, name: str, plain: Call, cut: CutPoint) -> Call:
        def call(module: Module, x: mx.array, cache: Any = None) -> Any:
            if not self.is_active:
                return plain(module, x, cache)

            def in_groups(name: str) -> Any:
                return self._in_groups(name, functools.partial(plain, module), cut, (x,), {})

            if (recurrences := self._layers.recurrences) is not None:
                advance = recurrences.child(module, x)
                if advance is not None:
                    return self._advance(name, advance, lambda: in_groups("")[0]), None
            return in_groups(name)

        return call

    def whole(self, name: str, plain: Call) -> Call:
        def call(module: Module, ids: mx.array, cache: Any = None) -> Any:
            if not hasattr(cache, "mute"):
                return plain(module, ids, cache)
            step, pool = self._layers.step, self._layers.pool
            outputs = []
            for group in step.groups:
                state: list[Any] = [pool.read(name, group)]
                outputs.append(plain(module, group.take(ids[:, 0]), state))
                pool.write(name, group, state[0])
            return step.join(outputs)[:, None]

        return call

    def scanned(self, plain: Call, inputs: Inputs) -> Call:
        name = f"{self._mixer.name}.selective_scan"
        A: list[mx.array] = []

        def scan(*args: Any) -> Any:
            if (recurrences := self._layers.recurrences) is not None:
                advance = recurrences.function("selective_scan", args, {})
                if advance is not None:
                    by_mlx_lm = functools.partial(self._in_groups, "", selective_scan, SCAN, args, {})
                    return self._advance(name, advance, lambda: by_mlx_lm()[0]), None
            return self._in_groups(name, selective_scan, SCAN, args, {})

        def call(module: Any, x: mx.array, *states: Any) -> Any:
            if not self.is_active:
                return plain(module, x, *states)
            if not A:
                A.append(-mx.exp(module.A_log))
                mx.eval(A)
            return process_rows(module, inputs, x, A[0], scan), (None, None)

        return call

    def _in_groups(
        self, name: str, plain: Call, cut: CutPoint, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        step, pool = self._layers.step, self._layers.pool

        def of_group(value: Any, group: SegmentGroup) -> Any:
            if not isinstance(value, mx.array) or value.ndim < 3 or value.shape[0] != 1:
                return value
            if value.shape[cut.axis] != step.num_rows:
                return value
            return group.take(value.swapaxes(1, cut.axis)[0]).swapaxes(1, cut.axis)

        if not name:
            args = tuple(map(_wide, args))
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
        outputs = []
        for group in step.groups:
            before = pool.read(name, group) if name else None
            given = [of_group(value, group) for value in args]
            named = {key: of_group(value, group) for key, value in kwargs.items() if key != cut.state}
            if len(given) > cut.position:
                given[cut.position] = before
            else:
                named[cut.state] = before
            y, after = plain(*given, **named)
            if name:
                pool.write(name, group, after)
            outputs.append(y.swapaxes(1, cut.axis))
        return step.join(outputs)[None].swapaxes(1, cut.axis), None

    def conv(self, name: str, conv: Any) -> Call:
        plain = type(conv).__call__
        keep = conv.weight.shape[1] - 1

        def call(module: Module, x: mx.array) -> Any:
            if not self.is_active:
                return plain(module, x)
            step, pool = self._layers.step, self._layers.pool
            if x.shape[:2] != (1, keep + step.num_rows):
                raise MixerError(f"a convolution over {x.shape}, not over the rows of the step")

            def in_groups(name: str) -> mx.array:
                outputs, rows = [], x if name else _wide(x)
                for group in step.groups:
                    before = pool.read(name, group) if name else None
                    if before is None:
                        before = mx.zeros((len(group), keep, x.shape[-1]), rows.dtype)
                    whole = mx.concatenate([before.astype(rows.dtype), group.take(rows[0, keep:])], axis=1)
                    if name:
                        pool.write(name, group, mx.contiguous(whole[:, whole.shape[1] - keep :]))
                    outputs.append(plain(module, whole))
                return step.join(outputs)[None]

            if (recurrences := self._layers.recurrences) is not None:
                advance = recurrences.conv(module, recurrences.kernels.rows_behind(x, keep))
                if advance is not None:
                    return self._advance(name, advance, lambda: in_groups(""))
            return in_groups(name)

        return call

    def shift(self, name: str, plain: Call) -> Call:
        weights: dict[mx.Dtype, mx.array] = {}

        def call(module: Module, x: mx.array, state: Any) -> Any:
            if not self.is_active:
                return plain(module, x, state)
            step, pool = self._layers.step, self._layers.pool

            def in_groups(name: str) -> mx.array:
                outputs = []
                for group in step.groups:
                    part = group.take(x[0])
                    outputs.append(plain(module, part, pool.read(name, group) if name else None))
                    if name:
                        pool.write(name, group, part[:, -1:])
                return step.join(outputs)[None]

            if (recurrences := self._layers.recurrences) is not None:
                if x.dtype not in weights:
                    weights[x.dtype] = _each(mx.array([[1.0], [0.0]], x.dtype), x.shape[-1])
                advance = recurrences.taps(x.squeeze(0), weights[x.dtype])
                if advance is not None:
                    return self._advance(name, advance, lambda: in_groups(""))
            return in_groups(name)

        return call

    def rope(self, plain: Call) -> Call:
        def call(module: Module, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            if not self.is_active:
                return plain(module, x, *args, **kwargs)
            return plain(module, x.swapaxes(0, 2), *args, **kwargs).swapaxes(0, 2)

        return call

    def shifted_heads(self, plain: Call) -> Call:
        taps: dict[str, mx.array] = {}

        def call(module: Module, u: mx.array, weights: mx.array, state: Any = None) -> Any:
            if not self.is_active:
                return plain(module, u, weights, state=state)
            name = f"{self._mixer.name}.side{self.num_shifted}"
            self.num_shifted += 1
            step, pool = self._layers.step, self._layers.pool

            def in_groups(name: str) -> mx.array:
                outputs = []
                for group in step.groups:
                    part = group.take(u.squeeze(2)).swapaxes(1, 2)
                    before = pool.read(name, group) if name else None
                    outputs.append(plain(module, part, weights, state=before).swapaxes(1, 2))
                    if name:
                        pool.write(name, group, part[:, :, -1:])
                return step.join(outputs)[:, :, None]

            if (recurrences := self._layers.recurrences) is not None:
                if name not in taps:
                    taps[name] = _each(weights.reshape(-1, 2).T, u.shape[-1])
                advance = recurrences.taps(u.reshape(u.shape[0], -1), taps[name])
                if advance is not None:
                    return self._advance(name, advance, lambda: in_groups("")).reshape(u.shape)
            return in_groups(name)

        return call


def _wide(value: Any) -> Any:
    floats = isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)
    return value.astype(mx.float32) if floats else value


def _each(weights: mx.array, times: int) -> mx.array:
    wide = mx.contiguous(mx.repeat(weights, times, axis=1))
    mx.eval(wide)
    return wide
