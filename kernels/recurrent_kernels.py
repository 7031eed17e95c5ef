"""Kernels of recurrences over slots of states, on whichever device, and the parameters that they take."""

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
    bounded   g = exp(lower_bound sigmoid(exp(A_log) (a + dt_bias))), beta likewise

    A_log has a value for each head, or for each value of a row of a; dt_bias is like a row of a.
    """

    kind: GateKind = "ready"
    A_log: mx.array | None = None
    dt_bias: mx.array | None = None
    lower_bound: float = 0.0
    beta_scale: float = 1.0


READY = DeltaGates()


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdParameters:
    """Parameters of a Mamba-2 layer, [H] each; steps softplus(dt + dt_bias) are kept within [lowest,
    highest]."""

    A_log: mx.array
    dt_bias: mx.array
    D: mx.array
    lowest: float = 0.0
    highest: float = float("inf")


@dataclass(frozen=True, slots=True)
class StateCapture:
    """``programs`` capture what kernels do; ``bind`` makes what they take for a step's segments of int32
    arrays [B, 4] and [C, 2], as in ``StateSegments``."""

    programs: Programs
    bind: Callable[[Sequence[mx.array]], Any]


class RecurrentKernels(Protocol):
    """All segments of a step at once.

    Each kernel takes a pool [num_slots, ...], what ``arrays`` made of the step, and the step's rows, and
    returns the pool's new handle and y. It writes the pool's own memory, so a step that is computed twice
    advances states twice: see ``StateSegments``.
    """

    def arrays(self, step: StateSegments) -> Any:
        """Make the arrays of a step that was checked against the pool: kernels write wherever it says."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """A pool of states [num_slots, ..] in memory that suits the kernels; every size is at least 1."""
        ...

    def mark_nonfinite(self, flags: mx.array, step: Any, y: mx.array) -> mx.array:
        """``flags`` int32 [T], no longer 0 where a state is NaN or infinite that the step leaves somewhere,
        by what it gave for its row of y [T, ..]; the flags given must not be used again."""
        ...

    def rows_behind(self, window: mx.array, keep: int) -> mx.array:
        """[T, C] of a window [1, keep + T, C] that was put together of ``keep`` rows and these."""
        ...

    def state_capture(self) -> StateCapture | None:
        """Capture of steps as programs; None where there is none."""
        ...

    def takes_gated_delta(self, key_dim: int) -> bool:
        """Whether there is a kernel for heads with keys of this size; likewise below."""
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
        """Lightning attention: ``recurrent_gla`` of mlx-lm, with its layout of states.

        pool float32 [N, H, Dk, Dv]; q, k [T, H, Dk]; v [T, H, Dv]; log_decay [H]. y is of the dtype of v.
        """
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
        """Mamba-1's recurrence, its skip D x included.

        pool float32 [N, W, Ds]; x, d [T, W], d after its softplus; B, C [T, Ds]; A [W, Ds] is -exp(A_log),
        made once; D [W]. y is of the dtype of x.
        """
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
        """RecurrentGemma's recurrence with its gates; the first token of a sequence is not scaled.

        pool float32 [N, W]; x, input_gate, a_gate [T, W], gates before their sigmoid; c [W] is -8 softplus of
        the layer's parameter, made once. y is of the dtype of x.
        """
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
        """RWKV-7's recurrence; ``reference.recurrent.wkv7`` has the formula.

        pool float32 [N, H, D, D]; the others [T, H, D], w the decay. y is of the dtype of r.
        """
        ...
