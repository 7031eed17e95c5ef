from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import mlx.core as mx

from .state_segments import StateSegments

GateKind = Literal["ready", "softplus", "bounded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaGates:
    """Formulas for the decay g and the factor beta of the delta rule, given a layer's a and b, in float32.

    ready     g = a, beta = b
    softplus  g = exp(-exp(A_log) softplus(a + dt_bias)), beta = beta_scale sigmoid(b)
    bounded   g = exp(lower_bound sigmoid(exp(A_log) (a + dt_bias))), beta as in softplus

    dt_bias has the shape of a row of a. A_log has that shape, too, or one value per head.
    """

    kind: GateKind = "ready"
    A_log: mx.array | None = None
    dt_bias: mx.array | None = None
    lower_bound: float = 0.0
    beta_scale: float = 1.0


READY = DeltaGates()


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdParameters:
    """Parameters of a Mamba-2 layer; arrays are [H]. softplus(dt + dt_bias) is clipped to the limits."""

    A_log: mx.array
    dt_bias: mx.array
    D: mx.array
    lowest: float = 0.0
    highest: float = float("inf")


class RecurrentKernels(Protocol):
    """Kernels that compute all segments of a step at once, and write states in place.

    A kernel takes a pool of states [num_slots, ...], the result of ``arrays`` for the step, and the step's
    rows. It returns the pool's new handle and y. A step computed twice advances states twice: see
    ``StateSegments``.
    """

    def arrays(self, step: StateSegments) -> Any:
        """Return the argument ``step`` of the kernels. Call ``step.check`` first."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """Return a pool of zeros in memory that suits the kernels; every size in ``shape`` is at least 1."""
        ...

    def mark_nonfinite(self, flags: mx.array, step: Any, y: mx.array) -> mx.array:
        """Return ``flags``, int32 [T], nonzero at rows whose kept state has NaN or infinity.

        The argument ``flags`` becomes invalid.
        """
        ...

    def rows_behind(self, window: mx.array, keep: int) -> mx.array:
        """Return ``window[0, keep:]``, the rows [T, C] after the first ``keep``."""
        ...

    @property
    def bind(self) -> Callable[[mx.array, mx.array], Any] | None:
        """Function that makes ``step`` of arrays of segments and checkpoints; None without captured steps."""
        ...

    @property
    def recurrence(self) -> RareRecurrence | None:
        """Kernels of rare recurrences; None if the backend has no such kernels."""
        ...

    def takes_gated_delta(self, key_dim: int) -> bool:
        """Return whether there is a ``gated_delta`` kernel for heads with keys of this size."""
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
        """Compute the gated delta rule; ``reference.recurrent.gated_delta`` has the formula.

        pool float32 [N, Hv, Dv, Dk]; q, k [T, Hk, Dk]; v [T, Hv, Dv]; a [T, Hv] or [T, Hv, Dk]; b [T, Hv]. y
        has the dtype of v.
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
        """Compute Mamba-2's recurrence; ``reference.recurrent.ssd`` has the formula.

        pool float32 [N, H, Dh, Ds]; x [T, H, Dh]; B, C [T, G, Ds]; dt [T, H], before its softplus. y has x's
        dtype.
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
        """Compute a depthwise causal convolution over the rows of each sequence, then SiLU if ``silu``.

        pool [N, K - 1, C], the inputs before the step, in the dtype of x or float32; x [T, C]; weight [K, C];
        bias [C]. y has the dtype of x. MLX's Conv1d has weights [C, K, 1]: transpose them once.
        """
        ...


RareRecurrence: TypeAlias = Callable[
    [str, mx.array, Any, list[mx.array], Sequence[float]], tuple[mx.array, mx.array]
]
"""Kernels of recurrences that few models have: (name, pool, step, inputs, options) -> (new handle, y). Pools
and steps are those of ``RecurrentKernels``; pools are float32. Inputs are rows of the step, then float32
parameters. y has the dtype of the first input unless the table says otherwise.

lightning        ``recurrent_gla`` of mlx-lm. pool [N, H, Dk, Dv]; q, k [T, H, Dk]; v [T, H, Dv], the dtype of
                 y; log_decay [H]; option: scale
selective_scan   Mamba-1, its skip D x included. pool [N, W, Ds]; x, d [T, W], d after its softplus; B, C
                 [T, Ds]; A [W, Ds], -exp(A_log); D [W]
rg_lru           RecurrentGemma; a sequence's first token is not scaled. pool [N, W]; x, input gate, a gate
                 [T, W], gates before their sigmoid; c [W], -8 softplus of the layer's parameter
wkv7             RWKV-7; ``reference.recurrent.wkv7`` has the formula. pool [N, H, D, D]; r, w, k, v, a, b
                 [T, H, D], w the decay
"""
