"""Cuts the computation of an image into portions of similar size, which are evaluated one by one."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.convolution import Conv2d, Conv3d
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_flatten

from ..adapt.install import Changed
from ..model_ops import ImageAttention
from ..overrides import adapt_module

MULTIPLICATIONS = 1 << 28
_SOFTMAX = 2  # time of a multiplication in attention, relative to linear layers
_ROTATION = 1 << 10  # time to rotate a value, relative to a multiplication in linear layers
_ROWWISE = ("mlp", "feed_forward")
_ROTATE = "apply_rotary_pos_emb_vision"


class Portions:
    """Results of an image's computation, in the order in which they must be evaluated.

    Linear layers and MLPs are computed for some rows at a time, and attention for some queries at a time.
    The division depends only on the image's size, so an image has the same bits whenever it is encoded.
    """

    def __init__(self, attention: ImageAttention | None) -> None:
        self.results: list[mx.array] = []
        self._attention = attention

    @contextmanager
    def recording(self) -> Iterator[list[mx.array]]:
        self.results.clear()
        token = _recording.set(self)
        try:
            yield self.results
        finally:
            _recording.reset(token)
            if self._attention is not None:
                self._attention.forget()

    def attend(self, q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, **more: Any) -> mx.array:
        original = mx.fast.scaled_dot_product_attention
        num_rows, num_seen = q.shape[-2], k.shape[-2]
        if isinstance(mask, str) or not num_rows:
            plain: mx.array = original(q, k, v, mask=mask, **more)
            return plain
        size = portion_rows(_SOFTMAX * q.shape[0] * q.shape[1] * num_seen * (k.shape[-1] + v.shape[-1]))
        self.results += [q, k, v]
        if mask is not None:
            mask = mx.broadcast_to(mask, (*mask.shape[:-2], num_rows, num_seen))
        found = None
        if self._attention is not None and set(more) == {"scale"}:
            found = self._attention(q, k, v, more["scale"], mask, size)
        if found is None:
            places = [slice(first, first + size) for first in range(0, num_rows, size)]
            masks = [None if mask is None else mask[..., place, :] for place in places]
            parts = [
                original(q[..., place, :], k, v, mask=part, **more)
                for place, part in zip(places, masks, strict=True)
            ]
        else:
            before, parts = found
            self.results += before
        self.results += parts
        return parts[0] if len(parts) == 1 else _concatenate(parts, axis=-2)


_recording: ContextVar[Portions | None] = ContextVar("octavo_image_portions", default=None)


def record_models() -> None:
    """Let mlx-vlm's models record their results, in threads that record.

    Their modules get a copy of ``mx``. Compiled functions would hide inner results and become plain ones.
    """
    changed = Changed(
        mx,
        compile=lambda function, **_: function,
        concatenate=_concatenate,
        eval=_evaluate,
        fast=Changed(mx.fast, scaled_dot_product_attention=_attend),
    )
    compiled = type(mx.compile(_evaluate))
    for module in [sys.modules[name] for name in sys.modules if name.startswith("mlx_vlm.models.")]:
        for each, value in vars(module).items():
            if value is mx:
                vars(module)[each] = changed
            elif isinstance(value, compiled):
                vars(module)[each] = next(x for x in gc.get_referents(value) if isinstance(x, FunctionType))
            elif each == _ROTATE and value.__code__.co_varnames[:2] == ("tensor", "freqs"):
                vars(module)[each] = _rotate_by_rows(value)


def _rotate_by_rows(rotate: Any) -> Any:
    def rotate_rows(x: mx.array, angles: mx.array) -> mx.array:
        size = portion_rows(_ROTATION * math.prod(x.shape[-2:]))
        cuts = [*range(size, len(angles), size)]
        pairs = zip(mx.split(x, cuts, axis=-3), mx.split(angles, cuts), strict=True)
        parts = [rotate(*pair) for pair in pairs]
        if (portions := _recording.get()) is not None:
            portions.results += parts
        return _concatenate(parts, axis=-3)

    return rotate_rows


def _concatenate(*arguments: Any, **more: Any) -> mx.array:
    result = mx.concatenate(*arguments, **more)
    if (portions := _recording.get()) is not None:
        portions.results.append(result)
    return result


def _attend(*arguments: Any, **more: Any) -> mx.array:
    portions = _recording.get()
    attend: Any = mx.fast.scaled_dot_product_attention if portions is None else portions.attend
    result: mx.array = attend(*arguments, **more)
    return result


def _evaluate(*arrays: Any) -> None:
    """Evaluate arrays, except while an image is recorded, because mlx-vlm evaluates a whole image early."""
    if _recording.get() is None:
        mx.eval(*arrays)


def portion_rows(work: int) -> int:
    return max(8, MULTIPLICATIONS // work // 8 * 8)


def use_linear_patches(model: Module) -> None:
    for _, module in model.named_modules():
        if isinstance(module, Conv2d | Conv3d) and _is_of_patches(module):
            weight = module["weight"]
            linear = Linear(1, 1, bias=False)
            linear.weight = weight.reshape(len(weight), -1)
            if "bias" in module:
                linear.bias = module["bias"]
            module["linear"] = linear
            adapt_module(module, _patches)


def _is_of_patches(conv: Any) -> bool:
    sizes = conv.weight.shape[1:-1]
    plain = not any(_each(conv.padding, sizes)) and set(_each(conv.dilation, sizes)) == {1}
    return plain and _each(conv.stride, sizes) == sizes and getattr(conv, "groups", 1) == 1


def _each(value: Any, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,) * len(sizes)


def _patches(_: Any) -> dict[str, Any]:
    def __call__(self: Any, x: mx.array) -> mx.array:
        sizes = self["weight"].shape[1:-1]
        counts = [length // size for length, size in zip(x.shape[1:-1], sizes, strict=True)]
        whole = tuple(slice(count * size) for count, size in zip(counts, sizes, strict=True))
        split = [each for pair in zip(counts, sizes, strict=True) for each in pair]
        rows = x[(slice(None), *whole)].reshape(len(x), *split, x.shape[-1])
        axes = range(1, 2 * len(sizes) + 1)
        rows = rows.transpose(0, *axes[::2], *axes[1::2], 2 * len(sizes) + 1)
        patches: mx.array = self["linear"](rows.reshape(len(x), *counts, -1))
        return patches

    return {"__call__": __call__}


def modules_to_cut(model: Module) -> list[tuple[Module, int]]:
    """Return the linear layers and MLPs with unpacked weights, and the number of rows of their portions."""
    return [
        (module, portion_rows(max(1, _num_weights(module))))
        for path, module in model.named_modules()
        if isinstance(module, Linear | QuantizedLinear) or path.endswith(_ROWWISE)
    ]


def _num_weights(module: Module) -> int:
    arrays = dict(tree_flatten(module.parameters())).values()
    return sum(2 * array.nbytes if array.dtype == mx.uint32 else array.size for array in arrays)


def cut(module: Module, num_rows: int, results: list[mx.array]) -> None:
    adapt_module(module, _by_rows, image_inputs=results, portion_rows=num_rows)


def _by_rows(kind: Any) -> dict[str, Any]:
    def __call__(self: Any, x: mx.array) -> mx.array:
        size, num_rows = self.portion_rows, math.prod(x.shape[:-1])
        if num_rows <= size:
            whole: mx.array = kind.__call__(self, x)
            return whole
        rows = x.reshape(num_rows, -1)
        parts = [kind.__call__(self, part) for part in mx.split(rows, [*range(size, num_rows, size)])]
        self.image_inputs += [rows, *parts]
        return _concatenate(parts).reshape(*x.shape[:-1], -1)

    return {"__call__": __call__}
