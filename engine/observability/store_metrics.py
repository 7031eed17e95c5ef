"""Prometheus metrics of pages outside the pool: there once a server keeps any on disk, or in memory."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..api.store_counters import DROP_REASONS, StoreCounts
from ..api.swap_counters import SwapCounts


class StoreCollector(Collector):
    """Reads the counts when it is scraped. ``counts`` is set by whoever hears of them; None: no store."""

    def __init__(self) -> None:
        self.counts: StoreCounts | None = None

    def collect(self) -> Iterator[Metric]:
        counts = self.counts
        if counts is None:
            return
        lookups = CounterMetricFamily(
            "octavo_store_lookups",
            "Prompts whose first page that was not in memory was on disk, or was not.",
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
        text = "Pages that are not or no longer on disk, and why."
        dropped = CounterMetricFamily("octavo_store_dropped_pages", text, labels=["reason"])
        for reason in DROP_REASONS:
            dropped.add_metric([reason], counts.dropped.get(reason, 0))
        yield dropped
        yield GaugeMetricFamily("octavo_store_bytes", "Bytes of pages on disk.", value=counts.num_bytes)


class SwapCollector(Collector):
    """The same for pages in memory beside the pool."""

    def __init__(self) -> None:
        self.counts: SwapCounts | None = None

    def collect(self) -> Iterator[Metric]:
        counts = self.counts
        if counts is None:
            return
        text = "Pages of requests that gave way, copied out of the pool and into it again."
        pages = CounterMetricFamily("octavo_swapped_pages", text, labels=["direction"])
        pages.add_metric(["out"], counts.num_out)
        pages.add_metric(["in"], counts.num_in)
        yield pages
        yield GaugeMetricFamily("octavo_swap_bytes", "Bytes of such pages outside.", value=counts.num_bytes)
