from __future__ import annotations

import mlx.core as mx

HIDDEN = -1e30
"""Mask values at or below this hide a position."""


def check_mask(mask: mx.array, *, tokens: int, num_heads: int, length: int) -> mx.array:
    """Return the mask as [T, 1 or Hq, L].

    Raises ValueError unless it fits a step of ``tokens`` rows and at most ``length`` positions.
    """
    if mask.shape not in ((tokens, length), (tokens, num_heads, length)):
        raise ValueError(
            f"mask must be {(tokens, length)} or {(tokens, num_heads, length)}, because the step "
            f"has {tokens} rows and its longest sequence {length} positions, got {mask.shape}"
        )
    if mask.dtype != mx.bool_ and not mx.issubdtype(mask.dtype, mx.floating):
        raise ValueError(f"mask must be bool or of a float type, got {mask.dtype}")
    return mask if mask.ndim == 3 else mask[:, None]
