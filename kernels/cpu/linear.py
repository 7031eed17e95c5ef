"""MLX modules that compute with native kernels.

Each is made in place from the MLX module it stands for: the object keeps its identity, its other
attributes and its base class, so that whoever holds or inspects it notices nothing but the speed.
Weights move into the kernels' layout; ``weight`` (``scales``, ``biases``) gives them back bit by
bit, as fresh copies, for model code that reads them.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from octavo.kernels import _ext

AFFINE_BITS = (4, 8)
AFFINE_GROUP_SIZES = (32, 64, 128)


def _original(name: str, index: int) -> property:
    """Attribute ``name`` of the MLX module: in its dictionary, or the packed array ``index``.

    Assigning to it works as on any MLX module, which deletes the attribute first: the weights
    go back to the dictionary and are packed again when they are next used.
    """

    def get(module: Any) -> mx.array:
        array: mx.array
        array = module[name] if module.packed is None else _ext.unpack(module.packed)[index]
        return array

    def delete(module: Any) -> None:
        module.restore()
        del module[name]

    return property(get, None, delete)


class _Packed:
    """What the native modules share: ``packed`` weights, None until they are packed."""

    packed: _ext.PackedWeight | None
    exact: bool
    names: tuple[str, ...] = ("weight",)  # of the arrays that get packed, in the order of unpack

    weight = _original("weight", 0)

    def pack(self: Any) -> None:
        """Move the weights into the kernels' layout and drop the originals. A bias is read now."""
        if self.packed is None:
            self.packed = self.make_packed()
            for name in self.names:
                del self[name]

    def restore(self: Any) -> None:
        """The reverse of ``pack``."""
        if self.packed is not None:
            for name, array in zip(self.names, _ext.unpack(self.packed), strict=True):
                self[name] = array
            self.packed = None

    def make_packed(self: Any) -> _ext.PackedWeight:
        return _ext.pack_dense(self["weight"], self.get("bias"))

    def multiply(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x [..., inputs] -> x W^T (+ bias) (+ residual) [..., outputs]."""
        if self.packed is None:
            self.pack()
        assert self.packed is not None
        return _ext.linear(x, self.packed, residual=residual, exact=self.exact)

    def _extra_repr(self) -> str:
        if self.packed is None:
            text: str = super()._extra_repr()  # type: ignore[misc]
            return text
        return f"{self.packed.inputs}, {self.packed.outputs}, {self.packed.nbytes} bytes packed"


class _Affine(_Packed):
    """The same for MLX's affine format."""

    names = ("weight", "scales", "biases")
    scales = _original("scales", 1)
    biases = _original("biases", 2)

    def make_packed(self: Any) -> _ext.PackedWeight:
        arrays = [self[name] for name in self.names]
        return _ext.pack_affine(*arrays, group_size=self.group_size, bits=self.bits, bias=self.get("bias"))


class NativeLinear(_Packed, Linear):
    """``nn.Linear`` with bf16, fp16 or fp32 weights."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.multiply(x)


class NativeQuantizedLinear(_Affine, QuantizedLinear):
    """``nn.QuantizedLinear`` with affine weights of 4 or 8 bits."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.multiply(x)


class NativeEmbedding(_Packed, Embedding):
    """``nn.Embedding`` whose ``as_linear`` is native. Packed when that is first called: a table
    that is only looked up stays as it is."""

    def __call__(self, x: mx.array) -> mx.array:
        if self.packed is None:
            rows: mx.array = Embedding.__call__(self, x)
            return rows
        return _ext.take_rows(self.packed, x)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.multiply(x)


class NativeQuantizedEmbedding(_Affine, QuantizedEmbedding):
    """``nn.QuantizedEmbedding`` with affine weights of 4 or 8 bits; packed like NativeEmbedding."""

    def __call__(self, x: mx.array) -> mx.array:
        if self.packed is None:
            rows: mx.array = QuantizedEmbedding.__call__(self, x)
            return rows
        return _ext.take_rows(self.packed, x)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.multiply(x)


class NativeRMSNorm(RMSNorm):
    """``nn.RMSNorm`` in one operation (MLX's own is a chain of several on the CPU)."""

    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        if mx.result_type(x, weight) != x.dtype:  # the result would be wider than x
            wide: mx.array = RMSNorm.__call__(self, x)
            return wide
        return _ext.rms_norm(x, weight, self.eps)
