"""Recurrent kernels compared with mlx-lm's operations and MLX's layers."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import silu
from mlx.nn.layers.convolution import Conv1d
from mlx_lm.models import gated_delta as mlx_lm_delta

from octavo.kernels.recurrent_kernels import RecurrentKernels
from octavo.kernels.state_segments import NO_STATE, StateSegments
from recurrent_cases import causal_conv, floats, gated_delta


def close(a: mx.array, b: mx.array, tolerance: float) -> bool:
    x, y = floats(a), floats(b)
    return bool(np.abs(x - y).max() <= tolerance * np.abs(y).max())


def fresh(lengths: Sequence[int]) -> StateSegments:
    step = StateSegments.of(lengths, source=[NO_STATE] * len(lengths), target=range(len(lengths)))
    step.check(len(lengths))
    return step


def check_gated_delta(kernels: RecurrentKernels, dtype: mx.Dtype, tolerance: float, *, vector: bool) -> None:
    T, Hk, Hv, D = 9, 2, 4, 32
    q, k = (mx.fast.rms_norm(mx.random.normal((1, T, Hk, D)), None, 1e-6) / D for _ in range(2))
    v, b = mx.random.normal((1, T, Hv, D)), mx.random.normal((1, T, Hv))
    a = mx.random.normal((1, T, Hv, D) if vector else (1, T, Hv))
    A_log, dt_bias = mx.random.normal((Hv, 1) if vector else (Hv,)), mx.random.normal(a.shape[2:])
    q, k, v, a, b = (x.astype(dtype) for x in (q, k, v, a, b))
    for bound in (None, -4.0):
        wanted, state = mlx_lm_delta.gated_delta_update(
            q, k, v, a, b, A_log, dt_bias, lower_bound=bound, allow_neg_eigval=True
        )
        rows = [x[0] for x in (q, k, v, a, b)]
        step = kernels.arrays(fresh([T]))
        pool, y = gated_delta(
            kernels,
            mx.zeros((1, Hv, D, D)),
            step,
            *rows,
            kind="softplus" if bound is None else "bounded",
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=bound or 0.0,
            beta_scale=2.0,
        )
        assert y.dtype == dtype
        assert close(y, wanted[0], tolerance)
        assert close(pool, state, tolerance)


def check_convolution(kernels: RecurrentKernels, dtype: mx.Dtype, tolerance: float) -> None:
    layer = Conv1d(48, 48, 4, groups=48, bias=True)
    layer.set_dtype(dtype)
    x = mx.random.normal((11, 48)).astype(dtype)
    wanted = silu(layer(mx.pad(x, [(3, 0), (0, 0)])[None]))[0]
    weight = mx.contiguous(layer.weight[..., 0].T)
    step = kernels.arrays(fresh([11]))
    pool, y = causal_conv(kernels, mx.zeros((1, 3, 48), dtype), step, x, weight, layer.bias, silu=True)
    assert y.dtype == dtype
    assert close(y, wanted, tolerance)
    assert mx.array_equal(pool[0], x[-3:])
