"""Recurrent layers on the native kernels: states in slots, written in place.

Every function takes a pool [num_slots, ...] and the rows of a step, and returns the pool's new handle and y. The
old handle is the same memory and must not be used again. Each evaluation advances the states:
see ``StateMetadata``. Bits of y and of states depend on the instruction level and on a sequence's own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from .. import _ext
from ..state_metadata import StateMetadata

MAX_KEY_DIM = 256
KEY_DIM_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class StateArrays:
    """A step's segments and checkpoints as the kernels read them, for all layers."""

    segments: mx.array
    checkpoints: mx.array

    @classmethod
    def of(cls, step: StateMetadata) -> StateArrays:
        """Of a step that was checked against the pool: kernels stop the process at indices outside of it."""
        return cls(mx.array(step.segments), mx.array(step.checkpoints))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaGates:
    """How a decay g and beta come from a layer's a and b, in float32.

    ready     g = a, beta = b
    softplus  g = exp(-exp(A_log) softplus(a + dt_bias)), beta = beta_scale sigmoid(b)
    bounded   g = exp(lower_bound sigmoid(exp(A_log) (a + dt_bias))), beta likewise

    A_log has a value for each head, or for each value of a row of a; dt_bias is like a row of a.
    """

    kind: Literal["ready", "softplus", "bounded"] = "ready"
    A_log: mx.array | None = None
    dt_bias: mx.array | None = None
    lower_bound: float = 0.0
    beta_scale: float = 1.0


READY = DeltaGates()


def takes_gated_delta(key_dim: int) -> bool:
    """Whether there is a kernel for heads with keys of this size."""
    return key_dim % KEY_DIM_MULTIPLE == 0 and 0 < key_dim <= MAX_KEY_DIM


def gated_delta(
    pool: mx.array,
    step: StateArrays,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    gates: DeltaGates = READY,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule; ``reference.recurrent.gated_delta`` has the formula.

    pool float32 [N, Hv, Dv, Dk]; q, k [T, Hk, Dk]; v [T, Hv, Dv]; a [T, Hv], or [T, Hv, Dk] for a gate of each
    value; b [T, Hv]. y is of the dtype of v.
    """
    return _ext.gated_delta(
        pool,
        step.segments,
        step.checkpoints,
        q,
        k,
        v,
        a,
        b,
        A_log=gates.A_log,
        dt_bias=gates.dt_bias,
        gates=gates.kind,
        lower_bound=gates.lower_bound,
        beta_scale=gates.beta_scale,
    )


def causal_conv(
    pool: mx.array,
    step: StateArrays,
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None = None,
    *,
    silu: bool = False,
) -> tuple[mx.array, mx.array]:
    """A depthwise causal convolution over the rows of each sequence, with its activation.

    pool [N, K - 1, C], earlier inputs, of the dtype of x or float32; x [T, C]; weight [K, C]; bias [C]. y is
    of the dtype of x. mlx's Conv1d keeps its weight as [C, K, 1]: turn it once, when the model is loaded.
    """
    return _ext.causal_conv(pool, step.segments, step.checkpoints, x, weight, bias, silu=silu)
