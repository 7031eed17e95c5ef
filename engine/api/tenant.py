from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """``share`` is the largest fraction of a shared resource that the tenant may use."""

    name: str = ""
    share: float = 1.0

    def part_of(self, total: int) -> int:
        """Return ``share`` of ``total``, rounded down but at least 1."""
        return min(max(1, int(total * self.share)), total)


TENANT_SHARE = 0.5
"""Share of each tenant on a server with several."""
NO_TENANT = Tenant()
"""Tenant of all requests on a server without tenants."""
