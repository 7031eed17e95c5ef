"""Merging of linear layers with a common input: q, k and v; gate and up.

The outputs of a group are adjacent in one packed matrix. The first layer that is called computes all
outputs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from octavo.kernels import _ext

from ..overrides import replaced
from .comparison import Calls
from .linear import Greedy, NativeLinear, NativeQuantizedLinear

_OBSERVED = (Linear, QuantizedLinear)
_TABLES = (Embedding, QuantizedEmbedding)


@dataclass(frozen=True, slots=True)
class Observed:
    groups: tuple[tuple[Any, ...], ...] = ()
    heads: tuple[Any, ...] = ()
    calls: Calls = field(default_factory=dict)


def observe(forward: Callable[[], object]) -> Observed:
    calls: list[tuple[Any, mx.array]] = []
    heads: list[tuple[Any, mx.array]] = []

    def noting(found: list[tuple[Any, mx.array]], original: Any) -> Any:
        def call(module: Any, x: mx.array) -> mx.array:
            found.append((module, copy.copy(x)))
            y: mx.array = original(module, x)
            return y

        return call

    layers = [(kind, "__call__", functools.partial(noting, calls)) for kind in _OBSERVED]
    tables = [(kind, "as_linear", functools.partial(noting, heads)) for kind in _TABLES]
    with replaced(*layers, *tables):
        forward()
    return Observed(tuple(map(tuple, _shared_inputs(calls))), tuple({id(m): m for m, _ in heads}.values()))


def _shared_inputs(calls: list[tuple[Any, mx.array]]) -> list[list[Any]]:
    groups: list[list[Any]] = []
    last: mx.array | None = None
    for layer, x in calls:
        if last is not None and _ext.same_array(last, x) and _alike(groups[-1][0], layer):
            groups[-1].append(layer)
        else:
            groups.append([layer])
        last = x
    called = [id(layer) for layer, _ in calls]
    return [group for group in groups if len(group) > 1 and all(called.count(id(m)) == 1 for m in group)]


def _alike(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or ("bias" in a) != ("bias" in b):
        return False
    settings: list[tuple[Any, ...]]
    if isinstance(a, QuantizedLinear):
        settings = [(m.mode, m.bits, m.group_size, m["scales"].dtype, m["scales"].shape[1]) for m in (a, b)]
    else:
        settings = [(m["weight"].dtype, m["weight"].shape[1]) for m in (a, b)]
    return bool(settings[0] == settings[1])


class Merged:
    def __init__(self, members: Sequence[Any]) -> None:
        self.members = list(members)
        first = self.members[0]
        self.whole = copy.copy(first)
        if "bias" in first:
            self.whole["bias"] = mx.concatenate([member["bias"] for member in self.members])
        self.whole.packed = self.whole.pack_stacked(self.members)
        for name in first.names:
            del self.whole[name]
        self.together = True
        self._input: mx.array | None = None
        self._output: mx.array | None = None
        self._waiting: set[int] = set()
        start = 0
        for index, member in enumerate(self.members):
            stop = start + member["weight"].shape[0]
            for name in member.names:
                del member[name]
            member.packed = self.whole.packed
            member.merged, member.index, member.span = self, index, slice(start, stop)
            member.__class__ = _MEMBERS[type(member)]
            start = stop

    def multiply(self, index: int, x: mx.array) -> mx.array:
        if not self.together:
            alone: mx.array = self.whole.multiply(x)[..., self.members[index].span]
            return alone
        if self._output is None or self._input is None or not _ext.same_array(self._input, x):
            self._input, self._output = copy.copy(x), self.whole.multiply(x)
            self._waiting = set(range(len(self.members)))
        part: mx.array = self._output[..., self.members[index].span]
        self._waiting.discard(index)
        if not self._waiting:
            self._input = self._output = None
        return part

    def dissolve(self) -> None:
        arrays = self.whole.unpack()
        for member in self.members:
            for name, array in zip(member.names, arrays, strict=True):
                member[name] = array[member.span]
            member.packed = member.merged = None
            member.__class__ = type(self.whole)
        mx.eval([member[name] for member in self.members for name in member.names])


class _Member:
    merged: Merged
    index: int
    span: slice

    def multiply(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        y = self.merged.multiply(self.index, x)
        return y if residual is None else y + residual

    def argmax(self, x: mx.array) -> Greedy:  # noqa: ARG002
        raise TypeError("layers that share a matrix do not choose among their own outputs")

    def unpack(self) -> list[mx.array]:
        return [array[self.span] for array in self.merged.whole.unpack()]

    def restore(self) -> None:
        self.merged.dissolve()

    def _extra_repr(self) -> str:
        start, stop = self.span.start, self.span.stop
        return f"outputs {start} to {stop} of {self.merged.whole._extra_repr()}"


class MergedLinear(_Member, NativeLinear): ...


class MergedQuantizedLinear(_Member, NativeQuantizedLinear): ...


_MEMBERS: dict[Any, Any] = {NativeLinear: MergedLinear, NativeQuantizedLinear: MergedQuantizedLinear}
