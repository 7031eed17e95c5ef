"""Replacements of MLX and NumPy functions that a few models apply to shims, in these models' modules only.

plamo tiles K and V to its number of heads, which for a handle means another order of query heads. gpt_bigcode
and llama4 count positions from the cache's offset with ``arange``; with one token per row that is the row's
position. plamo2 calls MLX's attention directly. All other names stay MLX's and NumPy's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx

from .cache_adapter import HookError, PagedKV, attention


class Changed:
    """A module with one replaced attribute; ``plain`` is the original."""

    def __init__(self, plain: ModuleType, name: str, replacement: Callable[..., Any] | Changed) -> None:
        self.plain = plain
        setattr(self, name, replacement)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def _tile(array: Any, reps: Sequence[int]) -> Any:
    if not isinstance(array, PagedKV):
        return mx.tile(array, reps)
    first, count, *rest = reps
    if first != 1 or rest != [1, 1]:
        raise HookError(f"the model tiles keys or values by {list(reps)}, not along their heads alone")
    return array.tiled(count)


def _arange(first: Any, *rest: Any, **options: Any) -> Any:
    import numpy as np

    return first[:, None] if isinstance(first, mx.array) else np.arange(first, *rest, **options)


def _mx_arange(first: Any, *rest: Any, **options: Any) -> Any:
    """Return each row's first position, [T, 1, 1], if ``first`` holds an offset per row."""
    return first[:, None, None] if isinstance(first, mx.array) else mx.arange(first, *rest, **options)


def _attend(queries: mx.array, keys: Any, values: Any, **options: Any) -> mx.array:
    if isinstance(keys, PagedKV):
        return attention(queries, keys, values, **options)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, **options)


_FAST: Any = mx.fast
_CHANGED: dict[str, tuple[str, str, Any]] = {
    "plamo": ("mx", "tile", _tile),
    "gpt_bigcode": ("np", "arange", _arange),
    "llama4": ("mx", "arange", _mx_arange),
    "plamo2": ("mx", "fast", Changed(_FAST, "scaled_dot_product_attention", _attend)),
}
"""By module of mlx-lm: the name it calls the library by, the attribute, and what takes its place."""


def install_names() -> None:
    """Replace the names in the modules that are imported; each is replaced once."""
    for model, (name, attribute, replacement) in _CHANGED.items():
        module = sys.modules.get(f"mlx_lm.models.{model}")
        if module is not None and not isinstance(plain := getattr(module, name), Changed):
            setattr(module, name, Changed(plain, attribute, replacement))
