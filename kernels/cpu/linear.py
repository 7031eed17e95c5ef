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
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

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
        array = module[name] if module.packed is None else module.unpack()[index]
        return array

    def delete(module: Any) -> None:
        module.restore()
        del module[name]

    return property(get, None, delete)


class _Packed:
    """What the native modules share: ``packed`` weights, None until they are packed."""

    packed: Any  # _ext.PackedWeight, or _ext.PackedExperts
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
            for name, array in zip(self.names, self.unpack(), strict=True):
                self[name] = array
            self.packed = None

    def make_packed(self: Any) -> Any:
        return _ext.pack_dense(self["weight"], self.get("bias"))

    def unpack(self) -> list[mx.array]:
        """The originals, in the order of ``names``."""
        return _ext.unpack(self.packed)

    def multiply(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x [..., inputs] -> x W^T (+ bias) (+ residual) [..., outputs]."""
        if self.packed is None:
            self.pack()
        return _ext.linear(_ext.shortcut(x), self.packed, residual=residual, exact=self.exact)

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

    def make_packed(self: Any) -> Any:
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


class _Experts(_Packed):
    """What native mixtures share: one packed weight per expert."""

    @property
    def input_dims(self) -> int:
        return int(self.packed.inputs if self.packed is not None else super().input_dims)  # type: ignore[misc]

    @property
    def output_dims(self) -> int:
        return int(self.packed.outputs if self.packed is not None else super().output_dims)  # type: ignore[misc]

    @property
    def num_experts(self) -> int:
        return len(self.packed.experts) if self.packed is not None else int(super().num_experts)  # type: ignore[misc]

    def make_packed(self: Any) -> Any:
        bias = self.get("bias")
        return _ext.PackedExperts(
            [self.pack_expert(e, None if bias is None else bias[e]) for e in range(self.num_experts)]
        )

    def pack_expert(self: Any, expert: int, bias: mx.array | None) -> _ext.PackedWeight:
        return _ext.pack_dense(self["weight"][expert], bias)

    def unpack(self) -> list[mx.array]:
        arrays = [_ext.unpack(weight) for weight in self.packed.experts]
        return [mx.stack(list(parts)) for parts in zip(*arrays, strict=True)]

    def __call__(
        self,
        x: mx.array,
        indices: mx.array,
        sorted_indices: bool = False,  # noqa: ARG002
    ) -> mx.array:
        """x [..., M, inputs] and indices [...], broadcast against each other, -> [..., M, outputs].
        Rows are grouped by expert anyway: ``sorted_indices`` changes nothing."""
        if self.packed is None:
            self.pack()
        return _ext.gather_linear(x, self.packed, indices, exact=self.exact)


class NativeSwitchLinear(_Experts, SwitchLinear):
    """mlx-lm's ``SwitchLinear`` with bf16, fp16 or fp32 weights."""


class NativeQuantizedSwitchLinear(_Experts, _Affine, QuantizedSwitchLinear):
    """mlx-lm's ``QuantizedSwitchLinear`` with affine weights of 4 or 8 bits."""

    def pack_expert(self: Any, expert: int, bias: mx.array | None) -> _ext.PackedWeight:
        arrays = [self[name][expert] for name in self.names]
        return _ext.pack_affine(*arrays, group_size=self.group_size, bits=self.bits, bias=bias)
