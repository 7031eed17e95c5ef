"""Tenants: clients that share a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """Client that shares a server with others.

    name    "" on a server without tenants
    share   largest part of shared resources (queue, pinned pages, watch streams) that this tenant may take
    """

    name: str = ""
    share: float = 1.0

    def part_of(self, total: int) -> int:
        """Return this tenant's part of ``total``: its share rounded down, but at least one."""
        return min(max(1, int(total * self.share)), total)


TENANT_SHARE = 0.5
"""Share of each tenant on a server with several."""
NO_TENANT = Tenant()
"""Tenant of all requests on a server without tenants."""
