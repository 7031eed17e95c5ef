from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from ..api.errors import Overloaded
from ..api.tenant import Tenant


class Holders:
    """Counts one kind of resource, with limits. ``peak`` is the largest ``total`` since the last reset."""

    def __init__(self, name: str, doing: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self._doing = doing
        self.total = self.num_begun = self.peak = 0
        self._by_tenant: Counter[str] = Counter()

    @contextlib.contextmanager
    def hold(self, tenant: Tenant) -> Iterator[None]:
        """Hold one resource during a ``with`` block. Raises Overloaded if a limit is exceeded."""
        self.take(tenant)
        try:
            yield
        finally:
            self.give_back(tenant)

    def take(self, tenant: Tenant, num: int = 1) -> None:
        """Count ``num`` resources until ``give_back``. Raises Overloaded if a limit is exceeded."""
        for count, limit, whose in (
            (self.total, self.limit, ""),
            (self._by_tenant[tenant.name], tenant.part_of(self.limit), " of one tenant"),
        ):
            if count + num > limit:
                numbers = {self.name: count, f"max_{self.name}": limit}
                raise Overloaded(
                    f"{count} {self._doing}, but at most {limit}{whose} are allowed; end one, or try later",
                    **numbers,
                )
        self._by_tenant[tenant.name] += num
        self.total += num
        self.num_begun += 1
        self.peak = max(self.peak, self.total)

    def give_back(self, tenant: Tenant, num: int = 1) -> None:
        self.total -= num
        self._by_tenant[tenant.name] -= num
        if not self._by_tenant[tenant.name]:
            del self._by_tenant[tenant.name]
