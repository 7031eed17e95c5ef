"""Panels of the Grafana dashboards. ``$instance`` and ``$__rate_interval`` are Grafana's variables."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

HERE = '{instance=~"$instance"}'


class Kind(enum.Enum):
    LINES = "lines"
    STACK = "stack"
    STAT = "stat"
    HEATMAP = "heatmap"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of a dashboard.

    width   number of columns, of 24
    """

    title: str
    unit: str
    series: Mapping[str, str]
    description: str = ""
    kind: Kind = Kind.LINES
    width: int = 12


@dataclass(frozen=True, kw_only=True)
class Page:
    uid: str
    title: str
    description: str
    panels: tuple[Panel, ...]


def total(name: str) -> str:
    return f"sum(octavo_{name}{HERE})"


def rate(name: str, by: str = "", only: str = "") -> str:
    """Return the expression of a rate per second, summed over all labels except ``by``."""
    chosen = f'{{instance=~"$instance"{only}}}'
    return f"sum{f' by ({by}) ' if by else ''}(rate(octavo_{name}{chosen}[$__rate_interval]))"


def by_tenant(name: str) -> str:
    return f"sum by (tenant) (octavo_tenant_{name}{HERE})"


def mean(name: str, only: str = "") -> str:
    return f"{rate(name + '_sum', only=only)} / {rate(name + '_count', only=only)}"


def quantiles(name: str, only: str = "") -> dict[str, str]:
    buckets = rate(f"{name}_bucket", "le", only)
    return {f"p{round(100 * q)}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.95, 0.99)}


def stat(title: str, unit: str, expression: str) -> Panel:
    return Panel(title=title, unit=unit, series={"": expression}, kind=Kind.STAT, width=4)


HIT_RATIO = f"{rate('prefix_cache_hit_tokens_total')} / {rate('prefix_cache_query_tokens_total')}"
HELD = 'sum(octavo_kv_pages{instance=~"$instance",state="held"})'
USAGE = f"{HELD} / {total('kv_pages')}"

SERVING = Page(
    uid="octavo-serving",
    title="Octavo: serving",
    description="What clients see: requests, tokens, latencies.",
    panels=(
        stat("Servers", "none", f"count(octavo_build_info{HERE})"),
        stat("Running", "none", total("requests_running")),
        stat("Waiting", "none", total("requests_waiting")),
        stat("Generated tokens/s", "none", rate("generated_tokens_total")),
        stat("Prompt tokens from the cache", "percentunit", HIT_RATIO),
        stat("Pages held", "percentunit", USAGE),
        Panel(title="Ended requests by reason", unit="reqps", kind=Kind.STACK,
              series={"{{finish_reason}}": rate("requests_total", "finish_reason")}),
        Panel(title="Refused requests by reason", unit="reqps", kind=Kind.STACK,
              series={"{{reason}}": rate("rejected_requests_total", "reason")}),
        Panel(title="Tokens per second", unit="none",
              series={"prompt": rate("prompt_tokens_total"), "generated": rate("generated_tokens_total")},
              description="Prompt tokens are counted when their request ends."),
        Panel(title="Time to first token", unit="s", series=quantiles("time_to_first_token_seconds")),
        Panel(title="Encoding of images, seconds per second", unit="none",
              series={"encoding": rate("image_encoding_seconds_sum")}),
        Panel(title="Time between tokens", unit="s", series=quantiles("inter_token_seconds")),
        Panel(title="Duration of requests", unit="s", series=quantiles("request_seconds")),
        Panel(title="Distribution of time to first token", unit="s", kind=Kind.HEATMAP, width=24,
              series={"{{le}}": rate("time_to_first_token_seconds_bucket", "le")}),
    ),
)  # fmt: skip

PAGES = Page(
    uid="octavo-pages",
    title="Octavo: pages and prefix cache",
    description="Who holds the KV pool, and what the prefix cache saves.",
    panels=(
        Panel(title="Pages by state", unit="none", kind=Kind.STACK,
              series={"{{state}}": f"sum by (state) (octavo_kv_pages{HERE})"}),
        Panel(title="Share of pages held", unit="percentunit",
              series={"{{instance}}": f"octavo_kv_usage_ratio{HERE}"}),
        Panel(title="Prompt tokens found in the cache", unit="percentunit", series={"hits": HIT_RATIO}),
        Panel(title="Prompt tokens looked up and found", unit="none",
              series={"looked up": rate("prefix_cache_query_tokens_total"),
                      "found": rate("prefix_cache_hit_tokens_total")}),
        Panel(title="Prompt tokens not found, by reason", unit="none", kind=Kind.STACK,
              series={"{{reason}}": rate("prefix_cache_miss_tokens_total", "reason")}),
        Panel(title="Cached pages evicted per second", unit="none",
              series={"evicted": rate("evicted_pages_total")}),
        Panel(title="Turnover of the pool per minute", unit="none",
              series={"turnover": f"60 * {rate('evicted_pages_total')} / {total('kv_pages')}"},
              description="1 means that as many pages are evicted in a minute as the pool has."),
        Panel(title="Preemptions per second", unit="none",
              series={"preempted": rate("preemptions_total")}),
        Panel(title="Pages of preempted requests copied out and back", unit="none",
              series={"{{direction}}": rate("swapped_pages_total", "direction")},
              description="Per second, of servers with --swap-memory."),
        Panel(title="Host memory used for swapped pages", unit="bytes",
              series={"{{instance}}": f"octavo_swap_bytes{HERE}"}),
        Panel(title="Look-ups on disk", unit="none", kind=Kind.STACK,
              series={"{{result}}": rate("store_lookups_total", "result")},
              description="Servers with --cache-dir."),
        Panel(title="Pages on disk", unit="bytes", series={"{{instance}}": f"octavo_store_bytes{HERE}"}),
        Panel(title="KV formats served", unit="none",
              series={"{{kv_format}}, pages of {{page_size}}":
                      f"count by (kv_format, page_size) (octavo_cache_config_info{HERE})"}),
    ),
)  # fmt: skip

CAPACITY = Page(
    uid="octavo-capacity",
    title="Octavo: capacity and scheduling",
    description="How full the engine's time, steps and pool are.",
    panels=(
        Panel(title="Sequences", unit="none", kind=Kind.STACK,
              series={"running": total("requests_running"), "waiting": total("requests_waiting")}),
        Panel(title="Time in the queue", unit="s", series=quantiles("queue_seconds")),
        Panel(title="Share of time spent computing", unit="percentunit",
              series={"{{instance}}": rate("step_seconds_sum", "instance")}),
        Panel(title="Duration of a step", unit="s", series=quantiles("step_seconds")),
        Panel(title="Duration of a step, predicted and measured", unit="s",
              series={"predicted": mean("step_predicted_seconds"), "measured": mean("step_seconds")},
              description="Mean, with --target-itl. The prediction decides how long prefill chunks are."),
        Panel(title="Steps per second", unit="none", series={"steps": rate("step_seconds_count")}),
        Panel(title="Mean tokens of a step", unit="none",
              series={kind: mean("step_tokens", f',kind="{kind}"') for kind in ("prefill", "decode")},
              description="Steps that computed any tokens of the kind."),
        Panel(title="Computed tokens per second", unit="none", kind=Kind.STACK,
              series={"{{kind}}": rate("step_tokens_sum", "kind")}),
        Panel(title="Generated tokens per second of computing", unit="none",
              series={"tokens": f"{rate('generated_tokens_total')} / {rate('step_seconds_sum')}"}),
        Panel(title="Pages held per running sequence", unit="none",
              series={"pages": f"{HELD} / clamp_min({total('requests_running')}, 1)"}),
        Panel(title="Draft tokens computed and accepted", unit="none", width=8,
              series={"computed": rate("spec_drafted_tokens_total"),
                      "accepted": rate("spec_accepted_tokens_total")},
              description="Servers with --speculate, and requests with a speculate parameter."),
        Panel(title="Draft acceptance rate by position", unit="percentunit", width=8,
              series={"all": f"{rate('spec_accepted_tokens_total')} / {rate('spec_drafted_tokens_total')}",
                      "{{position}}": f"{rate('spec_accepted_tokens_per_position_total', 'position')} "
                                      f"/ scalar({rate('drafts_total')})"},
              description="A draft behind a wrong one does not hold; place 0 is the first one."),
        Panel(title="Mean tokens of a step with drafts", unit="none", width=8,
              series={"tokens": f"1 + {rate('spec_accepted_tokens_total')} / {rate('drafts_total')}"},
              description="One sequence. 1 means that drafting gains nothing."),
        Panel(title="Distribution of decode tokens per step", unit="none", kind=Kind.HEATMAP,
              series={"{{le}}": rate("step_tokens_bucket", "le", ',kind="decode"')}),
    ),
)  # fmt: skip

TENANTS = Page(
    uid="octavo-tenants",
    title="Octavo: tenants",
    description="Who is served how much, and who waits. Tenants have names where --auth-token-file says so.",
    panels=(
        Panel(title="Running sequences by tenant", unit="none", kind=Kind.STACK,
              series={"{{tenant}}": by_tenant("requests_running")}),
        Panel(title="Waiting sequences by tenant", unit="none", kind=Kind.STACK,
              series={"{{tenant}}": by_tenant("requests_waiting")}),
        Panel(title="Prompt tokens computed per second, by tenant", unit="none", kind=Kind.STACK,
              series={"{{tenant}}": rate("tenant_served_tokens_total", "tenant", ',kind="prompt"')},
              description="Cached prompt tokens are not counted."),
        Panel(title="Tokens generated per second, by tenant", unit="none", kind=Kind.STACK,
              series={"{{tenant}}": rate("tenant_served_tokens_total", "tenant", ',kind="output"')}),
        Panel(title="Share of all tokens, by tenant", unit="percentunit", kind=Kind.STACK, width=24,
              series={"{{tenant}}": f"{rate('tenant_served_tokens_total', 'tenant')} "
                                    f"/ scalar({rate('tenant_served_tokens_total')})"}),
    ),
)  # fmt: skip

DASHBOARDS = (SERVING, PAGES, CAPACITY, TENANTS)
