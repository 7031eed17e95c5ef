"""How many calls, streams or watchers there are at once, by tenant, and how many there may be."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from ..api.errors import Overloaded
from ..api.tenant import Tenant


class Holders:
    """Counts one kind of thing that clients hold, and refuses more than a tenant or all may have.

    Lives on the event loop. A holder is counted for as long as the block of ``held`` lasts, so a count that
    is not 0 at rest is a leak.
    """

    def __init__(self, name: str, doing: str, most: int) -> None:
        """``name``: of the count, for programs. ``doing``: the sentence after the number, for people.
        ``most``: holders at once, of which a tenant may have its share."""
        self.name = name
        self.most = most
        self._doing = doing
        self._by_tenant: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._by_tenant.total()

    @contextlib.contextmanager
    def held(self, tenant: Tenant) -> Iterator[None]:
        """Count one holder more until the block ends. Raise Overloaded if that is too much."""
        self._check(tenant)
        self._by_tenant[tenant.name] += 1
        try:
            yield
        finally:
            self._by_tenant[tenant.name] -= 1
            if not self._by_tenant[tenant.name]:
                del self._by_tenant[tenant.name]  # names of tenants come and go

    def _check(self, tenant: Tenant) -> None:
        for count, most, whose in (
            (self.total, self.most, ""),
            (self._by_tenant[tenant.name], tenant.part_of(self.most), " of one tenant"),
        ):
            if count >= most:
                numbers = {self.name: count, f"max_{self.name}": most}
                raise Overloaded(
                    f"{count} {self._doing} and at most {most}{whose} may; end one, or try again later",
                    **numbers,
                )
