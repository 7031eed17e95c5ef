"""Memory beside the pool for simulated schedules: the real tier, pages without contents, a cost per copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.block_manager import BlockManager
from octavo.kernels.page_bytes import PageBytes

from ..kv_store.host_tier import HostTier
from ..kv_store.page_runs import PageLayoutKey
from ..kv_store.transfer import PageTransfer

PAGE_BYTES = 64  # as if: what counts is how many pages there are


class SimulatedPages:
    """A ``PageAccess`` whose copies take ``page_s`` seconds for each page of the simulation's time.

    copied_s   seconds of all copies so far: the tier's clock, which tells it how fast copies are
    """

    def __init__(self, page_s: float) -> None:
        self.copied_s = 0.0
        self._page_s = page_s

    @property
    def page_layout_key(self) -> PageLayoutKey:
        raise AssertionError("simulated pages leave this pool for no other one")

    def read_pages(self, pages: Sequence[int], group: int) -> PageBytes:  # noqa: ARG002
        self.copied_s += len(pages) * self._page_s
        return np.zeros((len(pages), PAGE_BYTES), np.uint8)

    def write_pages(self, pages: Sequence[int], data: PageBytes, group: int) -> None:  # noqa: ARG002
        self.copied_s += len(pages) * self._page_s


class SimulatedSwap:
    """What ``--swap-memory`` does to a simulated schedule.

    tier   a connector for the scheduler, with room for ``num_pages``
    """

    def __init__(self, blocks: BlockManager, num_pages: int, page_s: float) -> None:
        self._pages = SimulatedPages(page_s)
        self.tier = HostTier(
            self._pages,
            blocks,
            PageTransfer(self._pages, blocks),
            max_bytes=num_pages * PAGE_BYTES,
            clock=self.copied_s,
        )

    def copied_s(self) -> float:
        """Seconds of all copies so far."""
        return self._pages.copied_s
