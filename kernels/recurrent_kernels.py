from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from .state_segments import StateSegments

GATES = ("ready", "softplus", "bounded")
"""Formulas for the decay g and the factor beta of the delta rule, given a layer's a and b, in float32; the
order is that of Gates in csrc/recurrent/kernels.h.

ready     g = a, beta = b
softplus  g = exp(-exp(A_log) softplus(a + dt_bias)), beta = beta_scale sigmoid(b)
bounded   g = exp(lower_bound sigmoid(exp(A_log) (a + dt_bias))), beta as in softplus

dt_bias has the shape of a row of a. A_log has that shape, too, or one value per head.
"""


class RecurrentKernels(Protocol):
    """Kernels that compute all segments of a step at once, and write states in place.

    A step computed twice advances states twice: see ``StateSegments``.
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

    def takes(self, name: str, width: int) -> bool:
        """Return whether there is a kernel of this recurrence for states with a last axis of ``width``."""
        ...

    def recurrence(
        self, name: str, pool: mx.array, step: Any, inputs: Sequence[mx.array], options: Sequence[float] = ()
    ) -> tuple[mx.array, mx.array]:
        """Compute a recurrence of a step, given the states of all slots; return the pool's new handle and y.

        Inputs are rows of the step, then parameters. Pools are float32, and y has the dtype of the first
        input, unless the table says otherwise. ``reference.recurrent`` has the formulas.

        gated_delta      pool [N, Hv, Dv, Dk]; q, k [T, Hk, Dk]; v [T, Hv, Dv], the dtype of y; a [T, Hv] or
                         [T, Hv, Dk]; b [T, Hv]; dt_bias and A_log unless ready; options: index in ``GATES``,
                         lower_bound, beta_scale
        ssd              Mamba-2. pool [N, H, Dh, Ds]; x [T, H, Dh]; B, C [T, G, Ds]; dt [T, H], before its
                         softplus; A_log, dt_bias, D [H]; options: limits of softplus(dt + dt_bias)
        causal_conv      pool [N, K - 1, C], the inputs before the step, float32 or the dtype of x; x [T, C];
                         weight [K, C] (MLX's Conv1d has [C, K, 1]); bias [C] or none; option: 1 for SiLU
        lightning        ``recurrent_gla`` of mlx-lm. pool [N, H, Dk, Dv]; q, k [T, H, Dk]; v [T, H, Dv], the
                         dtype of y; log_decay [H]; option: scale
        selective_scan   Mamba-1, its skip D x included. pool [N, W, Ds]; x, d [T, W], d after its softplus;
                         B, C [T, Ds]; A [W, Ds], -exp(A_log); D [W]
        rg_lru           RecurrentGemma; a sequence's first token is not scaled. pool [N, W]; x, input gate,
                         a gate [T, W], gates before their sigmoid; c [W], -8 softplus(layer's parameter)
        wkv7             RWKV-7. pool [N, H, D, D]; r, w, k, v, a, b [T, H, D], w the decay
        """
        ...
