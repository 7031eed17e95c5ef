from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from octavo.kernels.interface import LayerSpec

from ...api.errors import ModelLoadError
from ..adapt import cache_adapter
from ..cache_layout import AttentionCache, CacheLayout, CachePlace, StateCache
from ..mlx_lm_import import cache as caches_of_mlx_lm
from ..recurrent.entries import EntrySpec
from ..recurrent.mixers import Observed, RecordingState, mixers_of, record_kv, watch


class _MarkedMask(str):
    window: int


class MaskWindows:
    def __init__(self, caches: Sequence[Any]) -> None:
        self._by_cache: dict[int, int] = {}
        self._windows: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        self._kept: list[object] = [*caches]  # keeps Python from reusing their ids
        for cache in caches:
            if hasattr(cache, "make_mask"):
                cache.make_mask = self._marking(cache.make_mask)
            cache.update_and_fetch = self._owning(id(cache), cache.update_and_fetch)

    def of(self, cache: Any) -> int | None:
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
        owner = self._owners.get(id(keys))
        window = mask.window if isinstance(mask, _MarkedMask) else self._windows.get(id(mask))
        if owner is not None and window is not None:
            self._by_cache[owner] = window


@contextmanager
def observe_windows(caches: Sequence[Any]) -> Iterator[MaskWindows]:
    windows = MaskWindows(caches)
    cache_adapter.observers.append(windows.attended)
    try:
        yield windows
    finally:
        cache_adapter.observers.remove(windows.attended)


_ATTENTION = (caches_of_mlx_lm.KVCache, caches_of_mlx_lm.RotatingKVCache, caches_of_mlx_lm.ChunkedKVCache)
FORWARDS = ((1,), (5, 1))


def discover_layout(model: Module, architecture: str) -> CacheLayout:
    """Return the shapes of every cache. Reads no weights. Raises ModelLoadError."""
    found = _Caches(architecture)
    try:
        for counts in FORWARDS if found.has_states(model) else ((2,),):
            logits = found.forward(model, counts)
    except ModelLoadError:
        raise
    except Exception as error:  # model code can raise anything
        raise ModelLoadError(f"model type {architecture!r} fails in mlx-lm itself: {error}") from error
    layers: list[LayerSpec] = []
    places = tuple(found.place(cache, layers) for cache in found.caches)
    entries = found.entries()
    if not layers and not entries:
        raise ModelLoadError(
            f"model type {architecture!r} stored neither KV nor recurrent state in a trial run, so it cannot "
            "be served; choose another model"
        )
    return CacheLayout(
        layers=tuple(layers),
        caches=places,
        dtype=found.dtype(logits),
        vocab_size=logits.shape[-1],
        mixers=mixers_of(model, found.observed) if entries else (),
        entries=entries,
    )


class _Caches:
    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.observed = Observed()
        self.caches: list[Any] = []
        self._windows = MaskWindows([])
        self._states: list[RecordingState] = []
        self._seen: dict[tuple[int, int], list[mx.array]] = {}

    def has_states(self, model: Module) -> bool:
        self.caches = self._make(model)
        return bool(self._states)

    def forward(self, model: Module, counts: tuple[int, ...]) -> mx.array:
        self.caches = self._make(model)
        logits: list[mx.array] = []

        def run() -> None:
            for count in counts:
                logits.append(model(mx.array([list(range(count))]), cache=self.caches))
                for state in self._states:
                    for entry, value in enumerate(state.cache):
                        if value is not None:
                            self._seen.setdefault((state.index, entry), []).append(value)

        attention = [cache for cache in _leaves(self.caches) if not isinstance(cache, RecordingState)]
        with observe_windows(attention) as self._windows:
            if self._states:
                watch(model, self.observed, run)
            else:
                run()
        return logits[-1]

    def place(self, cache: Any, layers: list[LayerSpec]) -> CachePlace:
        if isinstance(cache, caches_of_mlx_lm.CacheList):
            return tuple(self.place(part, layers) for part in cache.caches)
        if isinstance(cache, RecordingState):
            return StateCache(cache.index, len(cache.cache))
        if cache.keys is None:
            return None
        layers.append(_spec(cache, self._windows.of(cache)))
        return AttentionCache(len(layers) - 1)

    def entries(self) -> tuple[EntrySpec, ...]:
        return tuple(
            EntrySpec(
                tuple(map(max, zip(*(value.shape[1:] for value in values), strict=True))),
                _widest([value.dtype for value in values]),
            )
            for _, values in sorted(self._seen.items())
        )

    def dtype(self, logits: mx.array) -> mx.Dtype:
        keys = (cache.keys for cache in _leaves(self.caches) if not isinstance(cache, RecordingState))
        dtype: mx.Dtype = next((array.dtype for array in keys if array is not None), logits.dtype)
        return dtype

    def _make(self, model: Module) -> list[Any]:
        self._states = []
        return [self._one(cache) for cache in caches_of_mlx_lm.make_prompt_cache(model)]

    def _one(self, cache: Any) -> Any:
        if type(cache) is caches_of_mlx_lm.CacheList:
            return caches_of_mlx_lm.CacheList(*map(self._one, cache.caches))  # type: ignore[no-untyped-call]
        if isinstance(cache, caches_of_mlx_lm.ArraysCache):
            self._states.append(RecordingState(len(cache.cache), len(self._states), self.observed))
            return self._states[-1]
        if type(cache) in _ATTENTION:
            return record_kv(cache, self.observed)
        raise ModelLoadError(
            f"model type {self.architecture!r} uses the cache {type(cache).__name__}, which Octavo cannot "
            "store; supported are full attention, sliding-window attention and recurrent layers"
        )


def map_leaves(caches: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Return the model's caches with ``change`` applied to each cache, also in nested lists."""
    lists: Any = caches_of_mlx_lm.CacheList
    return [
        lists(*map_leaves(list(cache.caches), change)) if isinstance(cache, lists) else change(cache)
        for cache in caches
    ]


def _leaves(caches: list[Any]) -> list[Any]:
    found: list[Any] = []
    map_leaves(caches, found.append)
    return found


def _widest(dtypes: list[mx.Dtype]) -> mx.Dtype:
    return max(dtypes, key=lambda dtype: dtype.size)


def _spec(cache: Any, mask_window: int | None) -> LayerSpec:
    rotating = isinstance(cache, caches_of_mlx_lm.RotatingKVCache)
    head_dim, value_dim = cache.keys.shape[-1], cache.values.shape[-1]
    if cache.holds_keys_alone:
        head_dim, value_dim = head_dim // 2, head_dim - head_dim // 2
    chunked = isinstance(cache, caches_of_mlx_lm.ChunkedKVCache)
    window = cache.max_size if rotating else cache.chunk_size if chunked else None
    return LayerSpec(
        num_kv_heads=cache.keys.shape[1],
        head_dim=head_dim,
        value_dim=value_dim,
        window=mask_window or window,
        keep=cache.keep if rotating else 0,
        chunked=chunked,
    )
