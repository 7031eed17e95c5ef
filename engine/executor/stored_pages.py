"""A model's pages and state slots: copies within the pools, and their bytes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from octavo.block_manager import PageCopy, ResidualWindow
from octavo.kernels.interface import PagedKVCache, PageStorage, PoolSpec
from octavo.kernels.page_bytes import PageBytes

from ..api.engine_info import EngineInfo
from ..kv_store.fingerprint import model_fingerprint
from ..kv_store.page_runs import PageLayoutKey, StateKind
from .recurrent.state_pool import StatePool


class StoredPages:
    """The page storages of a KV cache, one for each group, and behind them the slots of recurrent states."""

    def __init__(
        self, kv_cache: PagedKVCache, states: StatePool | None, info: EngineInfo, *, exact: bool = False
    ) -> None:
        self._kv_cache = kv_cache
        self._states = states
        self._info = info
        self._exact = exact

    @property
    def storages(self) -> tuple[PageStorage, ...]:
        """Pages of each group, then of each residual window."""
        return self._kv_cache.storages

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages and slots before the step that writes them."""
        for group, pages in enumerate(self.storages):
            if pairs := [(copy.source, copy.target) for copy in copies if copy.group == group]:
                pages.copy_pages(pairs)
        behind = len(self._info.groups)
        if pairs := [(copy.source, copy.target) for copy in copies if copy.group == behind]:
            assert self._states is not None, "the model has no state slots to copy"
            self._states.copy_slots(pairs)

    def read(self, pages: Sequence[int], group: int) -> PageBytes:
        """Return the bytes of whole pages of one group, a copy."""
        if self._states is not None and group == len(self._info.groups):
            return self._states.read_slots(pages)
        if not self.storages:
            return np.empty((len(pages), 0), np.uint8)
        return self.storages[group].read_pages(pages)

    def write(self, pages: Sequence[int], data: PageBytes, group: int) -> None:
        """Put bytes as from ``read`` into these pages of a group."""
        if self._states is not None and group == len(self._info.groups):
            self._states.write_slots(pages, data)
        elif self.storages:
            self.storages[group].write_pages(pages, data)

    @functools.cached_property
    def layout_key(self) -> PageLayoutKey:
        """The kind of the pages, computed at first use, because it reads all weights on disk."""
        name = model_fingerprint(self._info.path, weights=self._info.weights, exact=self._exact)
        specs = tuple(storage.spec for storage in self.storages) or (self._spec_of_no_layers,)
        windows = [group for group in self._info.groups if isinstance(group, ResidualWindow)]
        context = windows[0].context if windows else ""
        return PageLayoutKey(name, specs, context, self._state_kind())

    @property
    def _spec_of_no_layers(self) -> PoolSpec:
        """Return the spec of a model without attention: its pages have no bytes."""
        return PoolSpec(
            layers=(),
            num_pages=self._info.num_pages,
            page_size=self._info.page_size,
            k_format="bf16",
            v_format="bf16",
        )

    def _state_kind(self) -> StateKind | None:
        states = self._states
        if states is None:
            return None
        entries = tuple(
            (name, tuple(entry.shape), str(entry.dtype).removeprefix("mlx.core."))
            for name, entry in sorted(states.entries.items())
        )
        return StateKind(self._info.page_size, entries, states.snapshot_bytes)
