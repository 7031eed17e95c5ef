"""Recurrences over slots of states in NumPy, token by token: the definition that kernels are compared with.

Every function takes the states of all slots [num_slots, ...], what a layer made of the T rows of a step, and
the step; it computes in the dtype of its arrays (float64 where it is to be the truth), writes states in place
and returns y.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..state_metadata import StateMetadata

Array = NDArray[Any]
Token = Callable[[Array, int], tuple[Array, Array]]


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def softplus(x: Array) -> Array:
    return np.logaddexp(x, np.zeros((), x.dtype))


def gated_delta(states: Array, step: StateMetadata, q: Array, k: Array, v: Array, g: Array, beta: Array) -> Array:
    """S = S diag(g);  u = beta (v - S k);  S += u k';  y = S q (Yang et al. 2024, arXiv:2412.06464).

    states [N, Hv, Dv, Dk]; q, k [T, Hk, Dk]; v [T, Hv, Dv]; g [T, Hv] or [T, Hv, Dk]; beta [T, Hv]. Value head
    h reads the key head h // (Hv / Hk).
    """
    repeats = v.shape[1] // q.shape[1]

    def token(state: Array, t: int) -> tuple[Array, Array]:
        query, key = (np.repeat(x[t], repeats, 0)[:, None] for x in (q, k))
        state = state * (g[t][:, None] if g.ndim == 3 else g[t][:, None, None])
        u = beta[t][:, None] * (v[t] - (state * key).sum(-1))
        state = state + u[..., None] * key
        return state, (state * query).sum(-1)

    return _walk(states, step, token, v.shape)


def delta_decay(a: Array, A_log: Array, dt_bias: Array, lower_bound: float | None = None) -> Array:
    """g of ``gated_delta``; with a lower bound as Kimi's, otherwise as Mamba-2's. A_log [Hv] or like a row of a."""
    A = np.exp(A_log if A_log.ndim == a.ndim - 1 else A_log[:, None])
    if lower_bound is not None:
        return np.asarray(np.exp(lower_bound * sigmoid(A * (a + dt_bias))))
    return np.asarray(np.exp(-A * softplus(a + dt_bias)))


def causal_conv(
    windows: Array, step: StateMetadata, x: Array, weight: Array, bias: Array | None, *, silu: bool
) -> Array:
    """y[t] = f(bias + sum_j weight[j] x[t - K + 1 + j]) per channel; f the identity or x sigmoid(x).

    windows [N, K - 1, C], the last inputs, oldest first; x [T, C]; weight [K, C].
    """

    def token(window: Array, t: int) -> tuple[Array, Array]:
        rows = np.concatenate([window, x[t : t + 1]])
        y = (rows * weight).sum(0) + (0 if bias is None else bias)
        return rows[1:], y * sigmoid(y) if silu else y

    return _walk(windows, step, token, x.shape)


def _walk(states: Array, step: StateMetadata, token: Token, shape: tuple[int, ...]) -> Array:
    """Tokens of each segment in order; what a segment reads was there before the step."""
    kept = {int(row): int(slot) for row, slot in step.checkpoints if row >= 0}
    y = np.zeros(shape, states.dtype)
    before = states.copy()
    for start, length, source, target in step.segments.tolist():
        if length == 0:
            continue
        state = before[source] if source >= 0 else np.zeros_like(states[0])
        for t in range(start, start + length):
            state, y[t] = token(state, t)
            if t in kept:
                states[kept[t]] = state
        states[target] = state
    return y
