"""Rotary embeddings as single native operations.

Every kind of mlx-lm is a rotation by ``position * inverse_frequency``, with factors on positions and values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.positional_encoding import RoPE

from octavo.kernels import _ext

from ..mlx_lm_import import ROPES, rope_utils
from ..overrides import replaced


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of the first ``dims`` values of a head.

    interleaved          whether the two values of a pair are neighbours; otherwise they lie dims / 2 apart
    inverse_frequencies  float32 [dims / 2]
    """

    dims: int
    interleaved: bool
    inverse_frequencies: mx.array
    position_scale: float = 1.0
    value_scale: float = 1.0


class _Native:
    rotation: Rotation

    def __call__(self, x: mx.array, offset: int | mx.array = 0, **unusual: Any) -> mx.array:
        if unusual or x.ndim not in (3, 4) or x.dtype not in (mx.bfloat16, mx.float16, mx.float32):
            turned: mx.array = super().__call__(x, offset=offset, **unusual)  # type: ignore[misc]
            return turned
        r = self.rotation
        return _ext.rope(
            x,
            offset,
            r.inverse_frequencies,
            dims=r.dims,
            interleaved=r.interleaved,
            position_scale=r.position_scale,
            value_scale=r.value_scale,
        )


def rotation_of(module: Any) -> Rotation:
    kind = type(module)
    if kind is RoPE:
        return Rotation(
            module.dims, module.traditional, _plain(module.dims, module.base), position_scale=module.scale
        )
    inverse = _reciprocal(module._freqs)
    if kind is rope_utils.SuScaledRoPE:
        return Rotation(module.dim, False, inverse, value_scale=float(module._scale))
    if kind is rope_utils.YarnRoPE:
        return Rotation(module.dims, module.traditional, inverse, value_scale=float(module.mscale))
    return Rotation(module.dims, module.traditional, inverse)


NATIVE: dict[type, type] = {kind: type(f"Native{kind.__name__}", (_Native, kind), {}) for kind in ROPES}


def computed_in_float32() -> AbstractContextManager[None]:
    """Make MLX's rotary embeddings compute in float32 while the block runs. Angles in bf16 are inexact."""

    def wide(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(module: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            return original(module, x.astype(mx.float32), *args, **kwargs).astype(x.dtype)

        return call

    return replaced(*((kind, "__call__", wide) for kind in NATIVE))


def _plain(dims: int, base: float) -> mx.array:
    exponents = np.arange(dims // 2, dtype=np.float64) / (dims / 2)
    return _shared((np.float64(base) ** -exponents).astype(np.float32).tobytes())


def _reciprocal(frequencies: mx.array) -> mx.array:
    inverse = 1.0 / np.array(frequencies.astype(mx.float32))
    return _shared(inverse.astype(np.float32).tobytes())


@functools.lru_cache(maxsize=64)
def _shared(frequencies: bytes) -> mx.array:
    array = mx.array(np.frombuffer(frequencies, np.float32))
    mx.eval(array)
    return array
