"""Interface of recurrent kernels over state slots, on any device, and their parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mlx.core as mx

from .replay import Programs
from .state_segments import StateSegments

GateKind = Literal["ready", "softplus", "bounded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaGates:
    """Formulas of a decay g and beta from a layer's a and b, in float32.

    ready     g = a, beta = b
    softplus  g = exp(-exp(A_log) softplus(a + dt_bias)), beta = beta_scale sigmoid(b)
    bounded   g = exp(lower_bound sigmoid(exp(A_log) (a + dt_bias))), beta as in softplus

    A_log has a value for each head, or for each value of a row of a; dt_bias has the shape of a row of a.
    """

    kind: GateKind = "ready"
    A_log: mx.array | None = None
    dt_bias: mx.array | None = None
    lower_bound: float = 0.0
    beta_scale: float = 1.0


READY = DeltaGates()


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdParameters:
    """Parameters of a Mamba-2 layer, [H] each; softplus(dt + dt_bias) is clipped to [lowest, highest]."""

    A_log: mx.array
    dt_bias: mx.array
    D: mx.array
    lowest: float = 0.0
    highest: float = float("inf")


@dataclass(frozen=True, slots=True)
class StateCapture:
    """Capture of recurrent steps. ``programs`` captures kernels. ``bind`` makes the kernels' arguments from
    segments [B, 4] and checkpoints [C, 2], int32 as in ``StateSegments``."""

    programs: Programs
    bind: Callable[[Sequence[mx.array]], Any]


class RecurrentKernels(Protocol):
    """Kernels that compute all segments of a step at once. Each kernel takes a pool [num_slots, ...], the
    result of ``arrays`` for the step, and the step's rows. It returns the pool's new handle and y. It writes
    the pool's own memory, so a step that is computed twice advances states twice: see ``StateSegments``."""

    def arrays(self, step: StateSegments) -> Any:
        """Make the arrays of a checked step; kernels write to any slot without a check."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """Return a pool of zero states [num_slots, ..] in memory that suits the kernels; sizes are at least
        1.
        """
        ...

    def mark_nonfinite(self, flags: mx.array, step: Any, y: mx.array) -> mx.array:
        """Return ``flags``, int32 [T], not 0 where the step keeps a state with NaN or infinity. A bad state
        is detected by its row of y [T, ..]. The given flags must not be used again."""
        ...

    def rows_behind(self, window: mx.array, keep: int) -> mx.array:
        """Return the last T rows, [T, C], of a window [1, keep + T, C] that was joined from two arrays."""
        ...

    def state_capture(self) -> StateCapture | None:
        """Return the capture of steps as programs; None if there is none."""
        ...

    def takes_gated_delta(self, key_dim: int) -> bool:
        """Whether there is a kernel for heads with keys of this size."""
        ...

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
        """Compute the gated delta rule; ``reference.recurrent.gated_delta`` has the formula. pool float32 [N,
        Hv, Dv, Dk]; q, k [T, Hk, Dk]; v [T, Hv, Dv]; a [T, Hv], or [T, Hv, Dk] for a gate of each value; b
        [T, Hv]. y has the dtype of v."""
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
        """Compute Mamba-2's recurrence; ``reference.recurrent.ssd`` has the formula. pool float32 [N, H, Dh,
        Ds]; x [T, H, Dh]; B, C [T, G, Ds]; dt [T, H], from the layer unchanged. y has the dtype of x."""
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
        """Compute a depthwise convolution over the rows of each sequence, with its activation. pool [N, K -
        1, C], earlier inputs, in the dtype of x or float32; x [T, C]; weight [K, C]; bias [C]. y has the
        dtype of x. mlx's Conv1d has weights [C, K, 1]: transpose them once."""
        ...


class RareRecurrentKernels(Protocol):
    """Kernels of recurrences that few models have; pools and steps are those of ``RecurrentKernels``."""

    def takes_lightning(self, key_dim: int, value_dim: int) -> bool: ...

    def takes_selective_scan(self, state_dim: int) -> bool: ...

    def takes_wkv7(self, head_dim: int) -> bool: ...

    def lightning(
        self,
        pool: mx.array,
        step: Any,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        log_decay: mx.array,
        scale: float,
    ) -> tuple[mx.array, mx.array]:
        """Compute lightning attention: ``recurrent_gla`` of mlx-lm, with its layout of states. pool float32
        [N, H, Dk, Dv]; q, k [T, H, Dk]; v [T, H, Dv]; log_decay [H]. y has the dtype of v."""
        ...

    def selective_scan(
        self,
        pool: mx.array,
        step: Any,
        x: mx.array,
        d: mx.array,
        B: mx.array,
        C: mx.array,
        *,
        A: mx.array,
        D: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """Compute Mamba-1's recurrence, its skip D x included. pool float32 [N, W, Ds]; x, d [T, W], d after
        its softplus; B, C [T, Ds]; A [W, Ds] is -exp(A_log), made once; D [W]. y has the dtype of x."""
        ...

    def rg_lru(
        self,
        pool: mx.array,
        step: Any,
        x: mx.array,
        input_gate: mx.array,
        a_gate: mx.array,
        *,
        c: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """Compute RecurrentGemma's recurrence with its gates; a sequence's first token is not scaled. pool
        float32 [N, W]; x, input_gate, a_gate [T, W], gates before their sigmoid; c [W] is -8 softplus of the
        layer's parameter, made once. y has the dtype of x."""
        ...

    def wkv7(
        self,
        pool: mx.array,
        step: Any,
        r: mx.array,
        w: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """Compute RWKV-7's recurrence; ``reference.recurrent.wkv7`` has the formula. pool float32 [N, H, D,
        D]; the others [T, H, D], w the decay. y has the dtype of r."""
        ...
