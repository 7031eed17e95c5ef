"""Attention windows of a model's masks, observed in a forward that is never evaluated.

Some models mask a window although their caches keep everything, or mask a different window. Each mask that a
cache makes is marked, so its use shows which layers have which window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ..adapt import cache_adapter


class _MarkedMask(str):
    """A mask given by name, such as "causal", with its requested window."""

    window: int


class MaskWindows:
    """Windows of the masks in attention over these caches."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self._by_cache: dict[int, int] = {}  # window by the id of a cache
        self._windows: dict[int, int] = {}  # window by the id of a mask array
        self._owners: dict[int, int] = {}  # caches by the id of their keys
        self._kept: list[object] = [*caches]  # references that keep ids from being reused
        for cache in caches:
            if hasattr(cache, "make_mask"):  # other caches: the model masks chunks itself
                cache.make_mask = self._marking(cache.make_mask)
            cache.update_and_fetch = self._owning(id(cache), cache.update_and_fetch)

    def of(self, cache: Any) -> int | None:
        """Return the window of attention over a cache, or None."""
        return self._by_cache.get(id(cache))

    def _marking(self, make_mask: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, window_size: int | None = None, **options: Any) -> Any:
            mask = make_mask(*args, window_size=window_size, **options)
            if window_size is None or mask is None:
                return mask
            if isinstance(mask, str):
                mask = _MarkedMask(mask)
                mask.window = window_size
            else:
                self._windows[id(mask)] = window_size
                self._kept.append(mask)
            return mask

        return marked

    def _owning(self, owner: int, update_and_fetch: Callable[..., Any]) -> Callable[..., Any]:
        def owned(*rows: mx.array) -> Any:
            keys, values = update_and_fetch(*rows)
            self._owners[id(keys)] = owner
            self._kept.append(keys)
            return keys, values

        return owned

    def attended(self, keys: Any, mask: Any) -> None:
        """Record a call of attention with these keys and this mask."""
        owner = self._owners.get(id(keys))
        window = mask.window if isinstance(mask, _MarkedMask) else self._windows.get(id(mask))
        if owner is not None and window is not None:
            self._by_cache[owner] = window


@contextmanager
def observe_windows(caches: Sequence[Any]) -> Iterator[MaskWindows]:
    """Record the windows that forwards with these caches mask while the block runs."""
    windows = MaskWindows(caches)
    cache_adapter.observers.append(windows.attended)
    try:
        yield windows
    finally:
        cache_adapter.observers.remove(windows.attended)
