"""Holders: calls, streams and watchers that exist at once, by tenant, and their limits.

``HolderRegistry`` knows all of them: whatever of a server is held by somebody is counted there.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

from ..api.errors import Overloaded
from ..api.tenant import Tenant


class Holders:
    """Counts one kind of thing that clients hold, and refuses more than a tenant or all may have.

    Lives on the event loop. A holder is counted for as long as the block of ``held`` lasts, so a count that
    is not 0 at rest is a leak.

    total   holders now; may be read by any thread
    """

    def __init__(self, name: str, doing: str, most: int) -> None:
        """``name``: of the count, for programs. ``doing``: the sentence after the number, for people.
        ``most``: holders at once, of which a tenant may have its share."""
        self.name = name
        self.most = most
        self._doing = doing
        self.total = 0
        self._by_tenant: Counter[str] = Counter()

    @contextlib.contextmanager
    def held(self, tenant: Tenant) -> Iterator[None]:
        """Count one holder more until the block ends. Raise Overloaded if that is too much."""
        self._check(tenant)
        self._by_tenant[tenant.name] += 1
        self.total += 1
        try:
            yield
        finally:
            self.total -= 1
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


class HolderRegistry:
    """All that clients and requests of one server hold, by kind. At rest each count is 0, but for pins, which
    clients keep on purpose."""

    def __init__(self) -> None:
        self._counts: dict[str, Callable[[], int]] = {}

    def add(self, kind: str, count: Callable[[], int]) -> None:
        """``count``: holders now; called by any thread."""
        assert kind not in self._counts, f"{kind} are counted already"
        self._counts[kind] = count

    def add_holders(self, holders: Holders) -> Holders:
        """Return ``holders``, which are counted from now on."""
        self.add(holders.name, lambda: holders.total)
        return holders

    def counts(self) -> dict[str, int]:
        return {kind: count() for kind, count in self._counts.items()}
