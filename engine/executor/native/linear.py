"""MLX modules converted in place to modules that compute with native kernels.

Weights move into the kernels' layout. Reading ``weight`` returns a bit-identical copy of the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from octavo.kernels import _ext

from .activations import FLOATS

AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
AFFINE_GROUP_SIZES = (32, 64, 128)
FP4_MODES = ("mxfp4", "nvfp4")


def quantized_reason(module: Any, num_dims: int = 2) -> str | None:
    scales = module["scales"]
    if scales.ndim != num_dims:
        return f"scales of shape {list(scales.shape)}"
    if getattr(module, "global_scale", None) is not None:
        return f"weights in {module.mode} with a global scale"
    if module.mode in FP4_MODES:
        return None if scales.dtype == mx.uint8 else f"{module.mode} scales in {scales.dtype}"
    if module.mode != "affine":
        return f"weights in {module.mode}"
    if module.bits not in AFFINE_BITS:
        return f"weights of {module.bits} bits"
    if module.group_size not in AFFINE_GROUP_SIZES:
        return f"weights in groups of {module.group_size}"
    return None if scales.dtype in FLOATS else f"scales in {scales.dtype}"


class Greedy(NamedTuple):
    """Greedy ids, int32 [...], and their logits, float32 [...]."""

    ids: mx.array
    logits: mx.array


def _original(name: str, index: int) -> property:
    def get(module: Any) -> mx.array | None:
        if name not in module.names:  # fp4 weights have no biases
            return None
        array: mx.array
        array = module[name] if module.packed is None else module.unpack()[index]
        return array

    def delete(module: Any) -> None:
        module.restore()
        del module[name]

    return property(get, None, delete)


class _Packed:
    packed: Any  # _ext.PackedWeight or _ext.PackedExperts
    exact: bool
    names: tuple[str, ...] = ("weight",)

    weight = _original("weight", 0)

    def pack(self: Any) -> None:
        """Move the weights into the kernels' layout and drop the originals."""
        if self.packed is None:
            self.packed = self.make_packed()
            for name in self.names:
                del self[name]

    def restore(self: Any) -> None:
        if self.packed is not None:
            for name, array in zip(self.names, self.unpack(), strict=True):
                self[name] = array
            self.packed = None

    def make_packed(self: Any) -> Any:
        return self.pack_stacked([self])

    def pack_stacked(self: Any, layers: Sequence[Any]) -> Any:
        return _ext.pack_stacked([layer["weight"] for layer in layers], self.get("bias"))

    def unpack(self) -> list[mx.array]:
        return _ext.unpack(self.packed)

    def multiply(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """Return x W^T (+ bias) (+ residual) [..., outputs] for x [..., inputs]."""
        if self.packed is None:
            self.pack()
        return _ext.linear(_ext.shortcut(x), self.packed, residual=residual, exact=self.exact)

    def argmax(self, x: mx.array) -> Greedy:
        """Return ``mx.argmax(multiply(x), -1)`` without storing the logits."""
        if self.packed is None:
            self.pack()
        return Greedy(*_ext.linear_argmax(x, self.packed, exact=self.exact))

    def _extra_repr(self) -> str:
        if self.packed is None:
            text: str = super()._extra_repr()  # type: ignore[misc]
            return text
        return f"{self.packed.inputs}, {self.packed.outputs}, {self.packed.nbytes} bytes packed"


class _Quantized(_Packed):
    biases = _original("biases", 2)
    scales = _original("scales", 1)

    @property
    def names(self: Any) -> tuple[str, ...]:  # type: ignore[override]
        return ("weight", "scales", "biases") if self.mode == "affine" else ("weight", "scales")

    def pack_stacked(self: Any, layers: Sequence[Any]) -> Any:
        return self.pack_arrays([[layer[name] for layer in layers] for name in self.names], self.get("bias"))

    def pack_arrays(self: Any, arrays: list[list[mx.array]], bias: mx.array | None) -> _ext.PackedWeight:
        if self.mode == "affine":
            codes, scales, biases = arrays
            return _ext.pack_stacked_affine(
                codes, scales, biases, group_size=self.group_size, bits=self.bits, bias=bias
            )
        codes, scales = arrays
        return _ext.pack_stacked_fp4(codes, scales, mode=self.mode, bias=bias)


class NativeLinear(_Packed, Linear):
    def __call__(self, x: mx.array) -> mx.array:
        return self.multiply(x)


class NativeQuantizedLinear(_Quantized, QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        return self.multiply(x)


class NativeEmbedding(_Packed, Embedding):
    def __call__(self, x: mx.array) -> mx.array:
        if self.packed is None:
            return _ext.select_rows(self["weight"], x)
        return _ext.take_rows(self.packed, x)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.multiply(x)


class NativeQuantizedEmbedding(_Quantized, QuantizedEmbedding):
    def __call__(self, x: mx.array) -> mx.array:
        if self.packed is None:
            self.pack()
        return _ext.take_rows(self.packed, x)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.multiply(x)


class _Experts(_Packed):
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
        """Return [..., M, outputs] for x [..., M, inputs] and indices [...]."""
        if self.packed is None:
            self.pack()
        return _ext.gather_linear(x, self.packed, indices, exact=self.exact)


class NativeSwitchLinear(_Experts, SwitchLinear): ...


class NativeQuantizedSwitchLinear(_Experts, _Quantized, QuantizedSwitchLinear):
    def pack_expert(self: Any, expert: int, bias: mx.array | None) -> _ext.PackedWeight:
        packed: _ext.PackedWeight
        packed = self.pack_arrays([[self[name][expert]] for name in self.names], bias)
        return packed
