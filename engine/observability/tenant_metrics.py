"""Metrics of tenants: requests running and waiting, and tokens served, under a bounded number of labels."""

from __future__ import annotations

from collections import Counter as Sums
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from ..api.stats import TenantLoad, TenantTokens

MAX_TENANTS = 64
"""Number of tenants with a label of their own, in order of appearance; all other tenants share one label."""

OTHERS = "(others)"


class TenantMetrics:
    """Metrics by named tenant; requests without a tenant are not counted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("tenant",)
        self._running = Gauge(
            "octavo_tenant_requests_running",
            "Running sequences by tenant, updated at least once per second.",
            labels,
            registry=registry,
        )
        self._waiting = Gauge(
            "octavo_tenant_requests_waiting",
            "Waiting sequences by tenant, updated at least once per second.",
            labels,
            registry=registry,
        )
        self._tokens = Counter(
            "octavo_tenant_served_tokens",
            "Computed prompt tokens and generated tokens, by tenant.",
            (*labels, "kind"),
            registry=registry,
        )
        self._labels: dict[str, str] = {}  # labels of tenants with their own label
        self._counters: dict[tuple[str, str], Counter] = {}
        self._loads: Mapping[str, TenantLoad] = {}

    def set_loads(self, loads: Mapping[str, TenantLoad]) -> None:
        """Set the running and waiting sequences of each tenant. A mapping is read once, because a change
        replaces it."""
        if loads is self._loads:
            return
        self._loads = loads
        running: Sums[str] = Sums(dict.fromkeys(self._labels.values(), 0))
        waiting = running.copy()
        for tenant, load in loads.items():
            label = self._label(tenant)
            running[label] += load.running
            waiting[label] += load.waiting
        for gauge, sums in ((self._running, running), (self._waiting, waiting)):
            for label, count in sums.items():
                gauge.labels(label).set(count)

    def count(self, tokens: Mapping[str, TenantTokens]) -> None:
        """Count a step's tokens for each tenant."""
        for tenant, counts in tokens.items():
            label = self._label(tenant)
            for kind, number in counts._asdict().items():
                if (counter := self._counters.get((label, kind))) is None:
                    counter = self._counters[label, kind] = self._tokens.labels(label, kind)
                counter.inc(number)

    def _label(self, tenant: str) -> str:
        label = self._labels.get(tenant)
        if label is None:
            if len(self._labels) >= MAX_TENANTS:
                self._labels[OTHERS] = OTHERS  # zero when no tenant is left
                return OTHERS
            label = self._labels[tenant] = tenant
        return label
