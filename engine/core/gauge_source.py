from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from octavo.block_manager import BlockManager
from octavo.scheduler import Scheduler

from ..api.stats import AdapterLoad, Gauges, TenantLoad
from ..kv_store.page_store import PageStore

MEASURED_EVERY_S = 1.0


class TenantLoads:
    """Running and waiting sequences by tenant, at most a second old."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._loads: Mapping[str, TenantLoad] = {}
        self._measured_at: float | None = None

    def measure(self) -> Mapping[str, TenantLoad]:
        scheduler, now, before = self._scheduler, self._clock(), self._measured_at
        left_over = self._loads and not (scheduler.num_running or scheduler.num_waiting)
        if before is None or now - before >= MEASURED_EVERY_S or left_over:
            loads = scheduler.tenant_loads()
            self._loads = {name: TenantLoad(*load) for name, load in loads.items() if name}
            self._measured_at = now
        return self._loads


class GaugeSource:
    def __init__(
        self,
        blocks: BlockManager,
        scheduler: Scheduler,
        *,
        store: PageStore | None = None,
        adapter_load: Callable[[], AdapterLoad] | None = None,
        media_waits: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._blocks = blocks
        self._scheduler = scheduler
        self._shards = None if store is None else store.shards
        self._host = None if store is None else store.host
        self._adapter_load, self._media_waits = adapter_load, media_waits
        self._tenants = TenantLoads(scheduler, clock)

    def measure(self, *, pages_pinned: int = 0, begun: frozenset[int] = frozenset()) -> Gauges:
        scheduler, blocks = self._scheduler, self._blocks
        held, idle_cached, idle_empty = blocks.counts
        return Gauges(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            pages_held=held,
            pages_idle_cached=idle_cached,
            pages_idle_empty=idle_empty,
            residual=blocks.residual_counts,
            states=blocks.state_counts,
            store=self._shards.counts() if self._shards is not None else None,
            swap=self._host.counts() if self._host is not None else None,
            tenants=self._tenants.measure(),
            pages_pinned=pages_pinned,
            begun=begun,
            adapters=self._adapter_load() if self._adapter_load is not None else None,
            media_waits=self._media_waits(),
        )
