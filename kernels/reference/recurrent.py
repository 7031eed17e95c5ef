"""Recurrences over state slots in NumPy, token by token, as a reference for kernels.

A recurrence takes the states of all slots [num_slots, ...], the step, and inputs for the step's T rows. It
writes states in place and returns y.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..state_segments import StateSegments

Array = NDArray[Any]
Token = Callable[[Array, int], tuple[Array, Array]]


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def softplus(x: Array) -> Array:
    return np.logaddexp(x, np.zeros((), x.dtype))


def gated_delta(
    states: Array, step: StateSegments, q: Array, k: Array, v: Array, g: Array, beta: Array
) -> Array:
    """S = S diag(g);  u = beta (v - S k);  S += u k';  y = S q (Yang et al. 2024, arXiv:2412.06464).

    states [N, Hv, Dv, Dk]; q, k [T, Hk, Dk]; v [T, Hv, Dv]; g [T, Hv] or [T, Hv, Dk]; beta [T, Hv]. Value
    head h reads the key head h // (Hv / Hk).
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
    """Return g of ``gated_delta``: with ``lower_bound`` as in Kimi K3, otherwise as in Mamba-2.

    A_log is [Hv] or has the shape of a row of a.
    """
    A = np.exp(A_log if A_log.ndim == a.ndim - 1 else A_log[:, None])
    if lower_bound is not None:
        return np.asarray(np.exp(lower_bound * sigmoid(A * (a + dt_bias))))
    return np.asarray(np.exp(-A * softplus(a + dt_bias)))


def causal_conv(
    windows: Array, step: StateSegments, x: Array, weight: Array, bias: Array | None, *, silu: bool
) -> Array:
    """y[t] = f(bias + sum_j weight[j] x[t - K + 1 + j]) per channel; f(x) is x, or with silu x sigmoid(x).

    windows [N, K - 1, C], the last inputs of each sequence, oldest first; x [T, C]; weight [K, C].
    """

    def token(window: Array, t: int) -> tuple[Array, Array]:
        rows = np.concatenate([window, x[t : t + 1]])
        y = (rows * weight).sum(0) + (0 if bias is None else bias)
        return rows[1:], y * sigmoid(y) if silu else y

    return _walk(windows, step, token, x.shape)


def ssd(
    states: Array, step: StateSegments, x: Array, B: Array, C: Array, d: Array, A_log: Array, D: Array
) -> Array:
    """S = S exp(-exp(A_log) d) + (d x) B';  y = S C + D x (Dao and Gu 2024, arXiv:2405.21060).

    states [N, H, Dh, Ds]; x [T, H, Dh]; B, C [T, G, Ds]; d [T, H]; A_log, D [H]. Head h reads group
    h // (H / G).
    """
    repeats = x.shape[1] // B.shape[1]

    def token(state: Array, t: int) -> tuple[Array, Array]:
        b, c = (np.repeat(part[t], repeats, 0)[:, None] for part in (B, C))
        decay = np.exp(-np.exp(A_log) * d[t])
        state = state * decay[:, None, None] + (d[t][:, None] * x[t])[..., None] * b
        return state, (state * c).sum(-1) + D[:, None] * x[t]

    return _walk(states, step, token, x.shape)


def lightning(
    states: Array, step: StateSegments, q: Array, k: Array, v: Array, *, log_decay: Array, scale: float
) -> Array:
    """S = exp(log_decay) S + k v';  y = scale S' q (Qin et al. 2024, arXiv:2401.04658).

    states [N, H, Dk, Dv]; q, k [T, H, Dk]; v [T, H, Dv]; log_decay [H].
    """

    def token(state: Array, t: int) -> tuple[Array, Array]:
        state = state * np.exp(log_decay)[:, None, None] + k[t][..., None] * v[t][:, None]
        return state, scale * (state * q[t][..., None]).sum(1)

    return _walk(states, step, token, v.shape)


def selective_scan(
    states: Array, step: StateSegments, x: Array, d: Array, B: Array, C: Array, *, A: Array, D: Array
) -> Array:
    """S = S exp(d A) + d x B;  y = S . C + D x for each channel (Gu and Dao 2023, arXiv:2312.00752).

    states [N, W, Ds]; x, d [T, W]; B, C [T, Ds]; A [W, Ds]; D [W].
    """

    def token(state: Array, t: int) -> tuple[Array, Array]:
        state = state * np.exp(d[t][:, None] * A) + (d[t] * x[t])[:, None] * B[t]
        return state, (state * C[t]).sum(-1) + D * x[t]

    return _walk(states, step, token, x.shape)


def rg_lru(
    states: Array, step: StateSegments, x: Array, input_gate: Array, a_gate: Array, *, c: Array
) -> Array:
    """h = a h + m x sigmoid(input_gate), a = exp(c sigmoid(a_gate)) (De et al. 2024, arXiv:2402.19427).

    m = sqrt(1 - a^2), and 1 for the first token of a sequence.

    states [N, W]; x and gates [T, W]; c [W].
    """
    new = {int(start) for start, length, source, _ in step.segments if length and source < 0}

    def token(state: Array, t: int) -> tuple[Array, Array]:
        a = np.exp(c * sigmoid(a_gate[t]))
        m = 1.0 if t in new else np.sqrt(1 - a * a)
        state = a * state + m * x[t] * sigmoid(input_gate[t])
        return state, state

    return _walk(states, step, token, x.shape)


def wkv7(
    states: Array, step: StateSegments, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array
) -> Array:
    """S = S diag(w) + (S a) b' + v k';  y = S r (Peng et al. 2025, arXiv:2503.14456).

    states [N, H, D, D], values by keys; the others [T, H, D].
    """

    def token(state: Array, t: int) -> tuple[Array, Array]:
        sa = (state * a[t][:, None]).sum(-1)
        state = state * w[t][:, None] + sa[..., None] * b[t][:, None] + v[t][..., None] * k[t][:, None]
        return state, (state * r[t][:, None]).sum(-1)

    return _walk(states, step, token, r.shape)


def _walk(states: Array, step: StateSegments, token: Token, shape: tuple[int, ...]) -> Array:
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
