"""Kernels of recurrences over slots of states, on whichever device, and the parameters that they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mlx.core as mx

from .state_segments import StateSegments


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdParameters:
    """Of a Mamba-2 layer, [H] each; steps softplus(dt + dt_bias) are kept within [lowest, highest]."""

    A_log: mx.array
    dt_bias: mx.array
    D: mx.array
    lowest: float = 0.0
    highest: float = float("inf")


class RecurrentKernels(Protocol):
    """All segments of a step at once.

    Each kernel takes a pool [num_slots, ...], what ``arrays`` made of the step, and the step's rows, and
    returns the pool's new handle and y. It writes the pool's own memory, so a step that is computed twice
    advances states twice: see ``StateSegments``.
    """

    def arrays(self, step: StateSegments) -> Any:
        """Of a step that was checked against the pool."""
        ...

    def takes_gated_delta(self, key_dim: int) -> bool: ...

    def takes_ssd(self, state_dim: int) -> bool: ...

    def gated_delta(
        self,
        pool: mx.array,
        step: Any,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        *,
        gates: DeltaGates = READY,
    ) -> tuple[mx.array, mx.array]:
        """The gated delta rule; ``reference.recurrent.gated_delta`` has the formula.

        pool float32 [N, Hv, Dv, Dk]; q, k [T, Hk, Dk]; v [T, Hv, Dv]; a [T, Hv], or [T, Hv, Dk] for a gate of
        each value; b [T, Hv]. y is of the dtype of v.
        """
        ...

    def ssd(
        self,
        pool: mx.array,
        step: Any,
        x: mx.array,
        B: mx.array,
        C: mx.array,
        dt: mx.array,
        *,
        parameters: SsdParameters,
    ) -> tuple[mx.array, mx.array]:
        """Mamba-2's recurrence; ``reference.recurrent.ssd`` has the formula.

        pool float32 [N, H, Dh, Ds]; x [T, H, Dh]; B, C [T, G, Ds]; dt [T, H], as the layer gives it. y is
        of the dtype of x.
        """
        ...

    def causal_conv(
        self,
        pool: mx.array,
        step: Any,
        x: mx.array,
        weight: mx.array,
        bias: mx.array | None = None,
        *,
        silu: bool = False,
    ) -> tuple[mx.array, mx.array]:
        """A depthwise convolution over the rows of each sequence, with its activation.

        pool [N, K - 1, C], earlier inputs, of the dtype of x or float32; x [T, C]; weight [K, C]; bias [C]. y
        is of the dtype of x. mlx's Conv1d keeps its weight as [C, K, 1]: turn it once.
        """
        ...
