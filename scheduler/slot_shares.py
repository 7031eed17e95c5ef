"""Shares of the running slots for tenants that have sequences at the same time."""

from __future__ import annotations

from .types import Sequence


class SlotShares:
    """Numbers of running and waiting sequences by tenant, and the part of the slots that each may claim.

    The slots are divided equally among the tenants that have a sequence here, at least one slot to each. A
    tenant may use more as long as no other tenant below its share waits. Each parallel sample counts as one.

    num_slots   number of sequences that can run at once now
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.running: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        self.are_several = (
            False  # whether several tenants are present; an attribute, because each step reads it
        )
        self._present: dict[str, int] = {}  # running and waiting sequences by tenant
        self._is_uneven: bool | None = False  # None: to be computed

    def count_running(self, sequence: Sequence, change: int) -> None:
        """Note that a sequence runs (1) or runs no longer (-1)."""
        self._count(self.running, sequence.tenant, change)

    def count_waiting(self, sequence: Sequence, change: int) -> None:
        """Note that a sequence waits (1) or waits no longer (-1)."""
        self._count(self.waiting, sequence.tenant, change)

    def limit(self, num_slots: int) -> None:
        """Note how many sequences can run at once."""
        self.num_slots, self._is_uneven = num_slots, None

    @property
    def are_claimed(self) -> bool:
        """Whether sequences of several tenants wait; otherwise shares have no effect."""
        return self.are_several and bool(self.waiting)

    @property
    def is_uneven(self) -> bool:
        """Whether one tenant is above its share while a sequence of a tenant below its share waits."""
        if self._is_uneven is None:
            share, running = self.share, self.running
            self._is_uneven = (
                self.are_claimed
                and max(running.values(), default=0) > share
                and any(running.get(tenant, 0) < share for tenant in self.waiting)
            )
        return self._is_uneven

    @property
    def share(self) -> int:
        """Number of slots that each tenant may claim."""
        return max(1, self.num_slots // max(1, len(self._present)))

    def is_below(self, tenant: str) -> bool:
        """Whether a tenant has fewer running sequences than its share."""
        return self.running.get(tenant, 0) < self.share

    def is_above(self, tenant: str) -> bool:
        """Whether a tenant has more running sequences than its share."""
        return self.running.get(tenant, 0) > self.share

    @property
    def num_claimed(self) -> int:
        """Number of slots that waiting sequences of tenants below their share may claim."""
        share = self.share
        running = self.running
        return sum([max(0, min(count, share - running.get(t, 0))) for t, count in self.waiting.items()])

    def leaves(self, tenant: str, num_free: int) -> bool:
        """Whether a tenant must leave the free slots to other tenants below their share."""
        return self.are_claimed and not self.is_below(tenant) and num_free <= self.num_claimed

    def _count(self, counts: dict[str, int], tenant: str, change: int) -> None:
        for each in (counts, self._present):
            left = each.get(tenant, 0) + change
            assert left >= 0, f"tenant {tenant!r} has less than no sequence"
            if left:
                each[tenant] = left
            else:
                del each[tenant]
        self.are_several = len(self._present) > 1
        self._is_uneven = None
