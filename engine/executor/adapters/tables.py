"""Adapter factors in slots, for the native kernels and for MLX's operations."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .files import Factors
from .layers import Shape, Table


class NativeTable:
    """``Table`` of pointers to factors in memory; a captured step reads the current factors."""

    def __init__(self, shapes: list[Shape], dtype: mx.Dtype, num_slots: int) -> None:
        from octavo.kernels import _ext

        self._ext, self._dtype, self._experts = _ext, dtype, shapes[0].experts
        outputs = [shape.outputs for shape in shapes]
        self._table = _ext.AdapterTable(shapes[0].inputs, outputs, self._experts, num_slots)

    def made(self, factors: Factors, gain: mx.array | None, bias: mx.array | None) -> tuple[Any, int]:
        a, b = factors.a.astype(self._dtype), factors.b.astype(self._dtype)
        made = self._ext.adapter_factors(
            a, b, scale=factors.scale, gain=gain, bias=None if gain is None else bias
        )
        return made, made.nbytes

    def put(self, slot: int, part: int, made: Any) -> None:
        self._table.put(slot, part, made)

    def clear(self, slot: int) -> None:
        self._table.clear(slot)

    def add(self, y: mx.array, x: mx.array, slots: mx.array) -> mx.array:
        if self._experts > 1:
            return self._ext.add_expert_adapters(y, x, slots, self._table)
        if x.shape[0] == slots.shape[0]:
            slots = slots.reshape(-1, *[1] * (x.ndim - 1))
        return self._ext.add_adapters(y, x, slots, self._table)


class MLXTable:
    """``Table`` for backends without a kernel, and the reference for the native one. Its arrays have a place
    for each slot and expert, padded with zeros to the largest rank, so slots take extra memory."""

    def __init__(self, shapes: list[Shape], num_slots: int, max_rank: int) -> None:
        (shape,) = shapes
        self._experts, self._outputs = shape.experts, shape.outputs
        places = (num_slots + 1) * shape.experts
        self._a = mx.zeros((places, shape.inputs, max_rank), mx.float32)
        self._b = mx.zeros((places, max_rank, shape.outputs), mx.float32)
        self._gain: mx.array | None = None  # [slots + 1, outputs], once an adapter has a gain
        self._bias = mx.zeros(shape.outputs, mx.float32)
        self._num_slots, self._used = num_slots, set[int]()

    def made(self, factors: Factors, gain: mx.array | None, bias: mx.array | None) -> tuple[Any, int]:
        a = factors.a.astype(mx.float32).swapaxes(1, 2)
        b = factors.scale * factors.b.astype(mx.float32)
        arrays = [mx.contiguous(each) for each in (a, b, gain, bias) if each is not None]
        mx.eval(arrays)
        return (*arrays, None, None)[:4], sum(array.nbytes for array in arrays)

    def put(self, slot: int, part: int, made: Any) -> None:  # noqa: ARG002
        a, b, gain, bias = made
        self.clear(slot)
        first, last, rank = slot * self._experts, (slot + 1) * self._experts, b.shape[1]
        self._a[first:last, :, :rank] = a
        self._b[first:last, :rank, :] = b
        if gain is not None:
            if self._gain is None:
                self._gain = mx.ones((self._num_slots + 1, self._outputs), mx.float32)
            self._gain[slot] = gain
            self._bias = self._bias if bias is None else bias.astype(mx.float32)
        self._used.add(slot)
        mx.eval(self._a, self._b, *(() if self._gain is None else (self._gain,)))

    def clear(self, slot: int) -> None:
        if slot in self._used:
            first, last = slot * self._experts, (slot + 1) * self._experts
            self._a[first:last], self._b[first:last] = 0, 0
            if self._gain is not None:
                self._gain[slot] = 1
            self._used.discard(slot)

    def add(self, y: mx.array, x: mx.array, slots: mx.array) -> mx.array:
        if self._experts > 1:
            z = mx.gather_mm(x.astype(mx.float32), self._a, rhs_indices=slots)
            return (y + mx.gather_mm(z, self._b, rhs_indices=slots)).astype(y.dtype)
        ids = slots.reshape(-1)
        flat = x.reshape(ids.shape[0], -1, x.shape[-1]).astype(mx.float32)
        z = mx.gather_mm(mx.gather_mm(flat, self._a, rhs_indices=ids), self._b, rhs_indices=ids)
        sums = y.astype(mx.float32).reshape(z.shape)
        if self._gain is None:
            return (sums + z).reshape(y.shape).astype(y.dtype)
        adapted = self._gain[ids][:, None] * (sums - self._bias + z) + self._bias
        has_gain = mx.any(self._gain[ids] != 1, axis=-1)[:, None, None]
        return mx.where(has_gain, adapted, sums + z).reshape(y.shape).astype(y.dtype)


def table_maker(*, native: bool, num_slots: int, max_rank: int) -> Any:
    """Return the factory of tables for ``adapt_layers``."""

    def make(shapes: list[Shape], dtype: mx.Dtype) -> Table:
        if native:
            return NativeTable(shapes, dtype, num_slots)
        return MLXTable(shapes, num_slots, max_rank)

    return make
