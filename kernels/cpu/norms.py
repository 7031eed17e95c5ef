"""MLX norms that compute in one native operation (MLX's own are chains of several on the CPU).

Made in place, like the modules of ``linear``. ``fuse`` lets a norm take over the addition before it.
"""

from __future__ import annotations

import mlx.core as mx
from mlx.nn.layers.normalization import LayerNorm, RMSNorm

from octavo.kernels import _ext


class NativeRMSNorm(RMSNorm):
    """``nn.RMSNorm``."""

    fuse: bool

    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        if mx.result_type(x, weight) != x.dtype:  # the result would be wider than x
            wide: mx.array = RMSNorm.__call__(self, x)
            return wide
        return _ext.rms_norm(x, weight, self.eps, fuse=self.fuse)


class NativeLayerNorm(LayerNorm):
    """``nn.LayerNorm``, with or without weight and bias."""

    fuse: bool

    def __call__(self, x: mx.array) -> mx.array:
        weight, bias = self.get("weight"), self.get("bias")
        for parameter in (weight, bias):
            if parameter is not None and mx.result_type(x, parameter) != x.dtype:
                wide: mx.array = LayerNorm.__call__(self, x)
                return wide
        return _ext.layer_norm(x, weight, bias, self.eps, fuse=self.fuse)
