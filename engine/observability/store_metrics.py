from __future__ import annotations

from collections import Counter as Sums
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..api.stats import TenantLoad, TenantTokens
from ..api.store_counters import DROP_REASONS, StoreCounts, SwapCounts

MAX_TENANTS = 64
"""Number of tenants with a label of their own, in order of appearance; all other tenants share one label."""

OTHERS = "(others)"


class TenantMetrics:
    """Metrics by tenant. Requests without a tenant are not counted."""

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
        self._labels: dict[str, str] = {}
        self._counters: dict[tuple[str, str], Counter] = {}
        self._loads: Mapping[str, TenantLoad] = {}

    def set_loads(self, loads: Mapping[str, TenantLoad]) -> None:
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
                self._labels[OTHERS] = OTHERS
                return OTHERS
            label = self._labels[tenant] = tenant
        return label


class StoreCollector(Collector):
    """Exports the counters of the disk store and of --swap-memory, if there are any."""

    def __init__(self) -> None:
        self.counts: StoreCounts | None = None
        self.swaps: SwapCounts | None = None

    def collect(self) -> Iterator[Metric]:
        if (counts := self.counts) is not None:
            yield _counters(
                "store_lookups",
                "Look-ups on disk for prompts that are not fully cached in memory, by result.",
                "result",
                {"hit": counts.hits, "miss": counts.misses},
            )
            for name, text, count in (
                ("loaded", "Pages read from disk.", counts.loaded),
                ("written", "Pages written to disk.", counts.written),
            ):
                yield CounterMetricFamily(f"octavo_store_{name}_pages", text, value=count)
            text = "Pages not written to disk, or removed from it, by reason."
            dropped = {reason: counts.dropped.get(reason, 0) for reason in DROP_REASONS}
            yield _counters("store_dropped_pages", text, "reason", dropped)
            yield GaugeMetricFamily("octavo_store_bytes", "Bytes of pages on disk.", value=counts.num_bytes)
        if (swaps := self.swaps) is not None:
            text = "Pages of preempted requests copied between pool and host memory, by direction (out, in)."
            yield _counters("swapped_pages", text, "direction", {"out": swaps.num_out, "in": swaps.num_in})
            text = "Bytes in host memory of pages of preempted requests."
            yield GaugeMetricFamily("octavo_swap_bytes", text, value=swaps.num_bytes)


def _counters(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"octavo_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
