"""PagePool of slots, where some may only run and the others only be found."""

from __future__ import annotations

from collections import abc

from .page_pool import PagePool
from .policies import EvictionPolicy
from .types import PageId


class SlotPool(PagePool):
    """Slots for states of recurrent layers.

    Those below ``num_running`` belong to running sequences, and those from there on are snapshots, which are
    kept in fewer bytes; 0: any slot may be either."""

    def __init__(
        self, num_slots: int, policy: EvictionPolicy, *, num_running: int, clock: abc.Callable[[], float]
    ) -> None:
        super().__init__(num_slots, policy, clock=clock)
        self._num_running = num_running

    @property
    def num_idle_to_run(self) -> int:
        if not self._num_running:
            return self.num_idle
        return sum(slot < self._num_running for slot in self._empty)

    @property
    def num_idle_for_snapshots(self) -> int:
        return self.num_idle - (self.num_idle_to_run if self._num_running else 0)

    def take(self, *, to_run: bool) -> PageId:
        """Hand out one slot, of which there must be one."""
        if self._num_running:
            fitting = (slot for slot in reversed(self._empty) if (slot < self._num_running) == to_run)
            slot = next(fitting, None)
            if slot is not None:
                self._empty.remove(slot)
            else:
                assert not to_run, "a slot is taken where none is idle"
                assert len(self._cached), "a snapshot is taken where no slot is idle"
                (slot,) = self._evict(1)
            self._ref_counts[slot] = 1
            return slot
        slots = self.allocate(1)
        assert slots is not None, "a slot is taken where none is idle"
        return slots[0]
