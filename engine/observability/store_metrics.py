"""Prometheus metrics of pages outside of the pool, for servers that keep pages on disk or in memory."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..api.store_counters import DROP_REASONS, StoreCounts, SwapCounts


class StoreCollector(Collector):
    """Reads the counts when it is scraped. ``counts`` is set after each step; None: no store."""

    def __init__(self) -> None:
        self.counts: StoreCounts | None = None

    def collect(self) -> Iterator[Metric]:
        counts = self.counts
        if counts is None:
            return
        lookups = CounterMetricFamily(
            "octavo_store_lookups",
            "Disk look-ups for prompts that were not fully cached in memory, by result.",
            labels=["result"],
        )
        lookups.add_metric(["hit"], counts.hits)
        lookups.add_metric(["miss"], counts.misses)
        yield lookups
        for name, text, count in (
            ("loaded", "Pages read from disk.", counts.loaded),
            ("written", "Pages written to disk.", counts.written),
        ):
            yield CounterMetricFamily(f"octavo_store_{name}_pages", text, value=count)
        text = "Pages not written to disk, or removed from it, by reason."
        dropped = CounterMetricFamily("octavo_store_dropped_pages", text, labels=["reason"])
        for reason in DROP_REASONS:
            dropped.add_metric([reason], counts.dropped.get(reason, 0))
        yield dropped
        yield GaugeMetricFamily("octavo_store_bytes", "Bytes of pages on disk.", value=counts.num_bytes)


class SwapCollector(Collector):
    """Counters of pages that --swap-memory keeps in host memory."""

    def __init__(self) -> None:
        self.counts: SwapCounts | None = None

    def collect(self) -> Iterator[Metric]:
        counts = self.counts
        if counts is None:
            return
        text = "Pages of preempted requests copied out of the pool and back, by direction."
        pages = CounterMetricFamily("octavo_swapped_pages", text, labels=["direction"])
        pages.add_metric(["out"], counts.num_out)
        pages.add_metric(["in"], counts.num_in)
        yield pages
        text = "Bytes of pages of preempted requests that are kept outside the pool."
        yield GaugeMetricFamily("octavo_swap_bytes", text, value=counts.num_bytes)
