"""Metrics of tenants: requests running and waiting, and tokens served, under a bounded number of labels."""

from __future__ import annotations

from collections import Counter as Sums
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from ..api.stats import TenantLoad, TenantTokens

MAX_TENANTS = 64
"""Tenants with a label of their own, the first that were seen; the others share one."""

OTHERS = "(others)"


class TenantMetrics:
    """Nothing is kept of those who have no name: where nobody has a token, all are one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("tenant",)
        self._running = Gauge(
            "octavo_tenant_requests_running",
            "Sequences of a tenant being computed, at most a second ago.",
            labels,
            registry=registry,
        )
        self._waiting = Gauge(
            "octavo_tenant_requests_waiting",
            "Sequences of a tenant waiting for room, at most a second ago.",
            labels,
            registry=registry,
        )
        self._tokens = Counter(
            "octavo_tenant_served_tokens",
            "Tokens of a tenant: prompt tokens that were computed, and generated ones.",
            (*labels, "kind"),
            registry=registry,
        )
        self._labels: dict[str, str] = {}  # of the tenants that have one of their own
        self._counters: dict[tuple[str, str], Counter] = {}
        self._loads: Mapping[str, TenantLoad] = {}

    def set_loads(self, loads: Mapping[str, TenantLoad]) -> None:
        """Set how much each tenant has running and waiting now. They are looked at once: a mapping is
        replaced when it changes."""
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
        """Count what a step has computed for each tenant."""
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
                self._labels[OTHERS] = OTHERS  # zero when nobody is left
                return OTHERS
            label = self._labels[tenant] = tenant
        return label
