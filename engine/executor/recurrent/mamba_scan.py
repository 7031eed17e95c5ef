from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

Inputs = Callable[[Any, mx.array, mx.array, mx.array], tuple[mx.array, mx.array, mx.array]]


def _of_mamba(module: Any, delta: mx.array, B: mx.array, C: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    if not module.use_bcdt_rms:
        return delta, B, C
    eps = module.args.mixer_rms_eps
    return (
        mx.fast.rms_norm(delta, None, eps),
        mx.fast.rms_norm(B, None, eps),
        mx.fast.rms_norm(C, None, eps),
    )


def _of_jamba(module: Any, delta: mx.array, B: mx.array, C: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    return module.dt_layernorm(delta), module.b_layernorm(B), module.c_layernorm(C)


INPUTS: dict[tuple[str, str], Inputs] = {
    ("mamba", "MambaBlock"): _of_mamba,
    ("jamba", "JambaMambaMixer"): _of_jamba,
}
"""Supported layers by model file and type, with their normalization function."""


def process_rows(module: Any, inputs: Inputs, x: mx.array, A: mx.array, scan: Callable[..., Any]) -> mx.array:
    x, z = module.in_proj(x).split(2, axis=-1)
    x = _silu(module.conv1d(mx.pad(x, [(0, 0), (module.conv_kernel_size - 1, 0), (0, 0)])))
    rank, size = module.time_step_rank, module.ssm_state_size
    delta, B, C = inputs(module, *mx.split(module.x_proj(x), [rank, rank + size], axis=-1))
    d = mx.logaddexp(module.dt_proj(delta), 0)  # softplus
    y, _ = scan(x, d, B, C, A, module.D, None)
    out: mx.array = module.out_proj(_silu(z) * y)
    return out


def selective_scan(
    x: mx.array,
    d: mx.array,
    B: mx.array,
    C: mx.array,
    A: mx.array,
    D: mx.array,
    state: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Compute S = S exp(d A) + d x B; y = S . C + D x (Gu and Dao 2023, arXiv:2312.00752).

    x, d [N, S, W]; B, C [N, S, Ds]; A [W, Ds]; D [W]; state [N, W, Ds]. Returns y like x, and the new state.
    """
    rows = []
    for t in range(x.shape[1]):
        new = (d[:, t] * x[:, t])[..., None] * B[:, t, None]
        if state is not None:
            new = new + state * mx.exp(d[:, t, :, None] * A)
        state = new
        rows.append((state @ C[:, t, :, None]).squeeze(-1))
    assert state is not None, "a scan over no rows"
    return mx.stack(rows, axis=1) + D * x, state


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)
