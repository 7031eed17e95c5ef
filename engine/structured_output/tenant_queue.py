"""A bounded queue that serves tenants in turn."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

from ..api.errors import Overloaded

Item = TypeVar("Item")


class TenantQueue(Generic[Item]):
    """First in, first out for each tenant; after its turn a tenant waits for all others. Thread-safe."""

    def __init__(self, *, max_items: int, max_per_tenant: int) -> None:
        self._max_items = max_items
        self._max_per_tenant = max_per_tenant
        self._waiting: OrderedDict[str, deque[Item]] = (
            OrderedDict()
        )  # non-empty queues by tenant, the next one first
        self._num_items = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return self._num_items

    def put(self, item: Item, tenant: str) -> None:
        """Add an item. Raises Overloaded if the queue is full, in all or for this tenant."""
        with self._changed:
            mine = self._waiting.get(tenant, ())
            for number, most, whose in (
                (len(mine), self._max_per_tenant, "of yours "),
                (self._num_items, self._max_items, ""),
            ):
                if number >= most:
                    raise Overloaded(
                        f"{number} schemas and grammars {whose}are waiting to be compiled, but at most "
                        f"{most} may; try again later",
                        waiting_compilations=number,
                        max_waiting_compilations=most,
                    )
            self._waiting.setdefault(tenant, deque()).append(item)
            self._num_items += 1
            self._changed.notify()

    def take(self) -> Item | None:
        """Wait for the next item and return it; None once the queue is closed."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            tenant, mine = self._waiting.popitem(last=False)
            item = mine.popleft()
            if mine:
                self._waiting[tenant] = mine
            self._num_items -= 1
            return item

    def remove(self, item: Item) -> bool:
        """Remove an item; return whether it was still waiting."""
        with self._changed:
            for tenant, mine in self._waiting.items():
                if item in mine:
                    mine.remove(item)
                    self._num_items -= 1
                    if not mine:
                        del self._waiting[tenant]
                    return True
        return False

    def close(self) -> list[Item]:
        """Close the queue; return the waiting items."""
        with self._changed:
            left = [item for mine in self._waiting.values() for item in mine]
            self._waiting.clear()
            self._num_items = 0
            self._is_closed = True
            self._changed.notify_all()
        return left
