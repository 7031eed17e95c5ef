"""The K/V cache of a model without attention: pages of no bytes, which name prefixes and hold nothing."""

from __future__ import annotations

from typing import NoReturn

import mlx.core as mx

from octavo.kernels.interface import AttendOptions, PagedKVCache, PageStorage
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.replay import ReplayablePool


class NoAttentionCache:
    """``PagedKVCache`` of no layers."""

    storages: tuple[PageStorage, ...] = ()
    replayable: tuple[ReplayablePool, ...] = ()

    def begin_step(self, metadata: AttentionMetadata) -> None: ...

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        del keys, values
        _refuse(layer)

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        del queries, options
        _refuse(layer)

    def gather(self, layer: int) -> tuple[mx.array, mx.array]:
        _refuse(layer)

    def pending(self) -> list[mx.array]:
        return []

    def flags(self) -> list[mx.array]:
        return []

    def nonfinite_tokens(self) -> list[int]:
        return []


def _refuse(layer: int) -> NoReturn:
    raise AssertionError(f"attention layer {layer} of a model that has none")


_: type[PagedKVCache] = NoAttentionCache
