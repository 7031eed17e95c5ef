"""Counts of what clients hold, such as calls, streams and watchers, with limits for all and for each tenant.

``HolderRegistry`` lists all counts. A count that is not 0 while the server is idle shows a leak.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

from ..api.errors import Overloaded
from ..api.tenant import Tenant


class Holders:
    """Counts one kind of resource that clients hold. Refuses more than the limit for all, or a tenant's share
    of it.

    Lives on the event loop. A resource is held while the block of ``held`` runs.

    total       number held now; may be read from any thread
    num_begun   number begun since this count was last set to 0; ``peak``: largest ``total`` since then
    """

    def __init__(self, name: str, doing: str, most: int) -> None:
        """Begin at 0. ``name`` is the count's name for programs, ``doing`` is text for error messages, and
        ``most`` is the limit, of which each tenant has its share."""
        self.name = name
        self.most = most
        self._doing = doing
        self.total = self.num_begun = self.peak = 0
        self._by_tenant: Counter[str] = Counter()

    @contextlib.contextmanager
    def held(self, tenant: Tenant) -> Iterator[None]:
        """Count one more until the block ends. Raises Overloaded if the limit is exceeded."""
        self._check(tenant)
        self._by_tenant[tenant.name] += 1
        self.total += 1
        self.num_begun += 1
        self.peak = max(self.peak, self.total)
        try:
            yield
        finally:
            self.total -= 1
            self._by_tenant[tenant.name] -= 1
            if not self._by_tenant[tenant.name]:
                del self._by_tenant[tenant.name]  # so that idle tenants take no memory

    def _check(self, tenant: Tenant) -> None:
        for count, most, whose in (
            (self.total, self.most, ""),
            (self._by_tenant[tenant.name], tenant.part_of(self.most), " of one tenant"),
        ):
            if count >= most:
                numbers = {self.name: count, f"max_{self.name}": most}
                raise Overloaded(
                    f"{count} {self._doing}, but at most {most}{whose} may; end one, or try again later",
                    **numbers,
                )


class HolderRegistry:
    """Counts of everything that clients and requests of a server hold, by kind. On an idle server each count
    is 0, except that of pins, which clients keep on purpose."""

    def __init__(self) -> None:
        self._counts: dict[str, Callable[[], int]] = {}

    def add(self, kind: str, count: Callable[[], int]) -> None:
        """Register a kind. ``count`` returns the number held now, and may be called on any thread."""
        assert kind not in self._counts, f"{kind} are counted already"
        self._counts[kind] = count

    def add_holders(self, holders: Holders) -> Holders:
        """Register ``holders`` and return it."""
        self.add(holders.name, lambda: holders.total)
        return holders

    def counts(self) -> dict[str, int]:
        return {kind: count() for kind, count in self._counts.items()}
