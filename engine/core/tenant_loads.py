"""Running and waiting sequences of each tenant, measured once per second."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.scheduler import Scheduler

from ..api.stats import TenantLoad

MEASURED_EVERY_S = 1.0  # seconds, because measuring examines every sequence


class TenantLoads:
    """Loads of named tenants, at most a second old, and current when nothing is left."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._loads: Mapping[str, TenantLoad] = {}
        self._measured_at: float | None = None

    def measure(self) -> Mapping[str, TenantLoad]:
        """Return the loads; the same mapping as before unless measured again."""
        scheduler, now, before = self._scheduler, self._clock(), self._measured_at
        left_over = self._loads and not (scheduler.num_running or scheduler.num_waiting)
        if before is None or now - before >= MEASURED_EVERY_S or left_over:
            loads = scheduler.tenant_loads()
            self._loads = {name: TenantLoad(*load) for name, load in loads.items() if name}
            self._measured_at = now
        return self._loads
