"""Who sends requests to a server that several share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """One of those who share a server.

    name    "" where there are no tenants
    share   of what they share (the queue, the pages that may be pinned, the streams that may watch): the
            largest part that this one may take
    """

    name: str = ""
    share: float = 1.0

    def part_of(self, total: int) -> int:
        """How many of ``total`` this tenant may have: its share rounded down, but one at least."""
        return min(max(1, int(total * self.share)), total)


NO_TENANT = Tenant()
"""Whoever sends requests to a server without tenants: everything is theirs."""
