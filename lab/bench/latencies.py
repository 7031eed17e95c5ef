"""Latencies of requests as clients see them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.engine.client.token_times import TokenTimes

from ..plots.figure import picture

PERCENTILES = (50, 95, 99)
LIMITS = ("ttft", "tpot", "itl", "e2el")  # first token, mean time per token, longest gap, whole request


@dataclass(slots=True)
class Trace:
    """Times of one request as the client saw them; ``e2e_s`` is the time until its stream ended."""

    times: TokenTimes
    e2e_s: float = 0.0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first message; 0 for a single token."""
        times = self.times
        if times.num_later:
            return sum(times.gaps_s) / times.num_later
        return self.e2e_s / times.num_tokens if times.num_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency limits of a good request, in milliseconds by a name in ``LIMITS``."""

    limits: Mapping[str, float]

    def kept_by(self, trace: Trace) -> bool:
        seconds = {
            "ttft": trace.times.ttft_s,
            "tpot": trace.tpot_s,
            "itl": max(trace.times.gaps_s, default=0.0),
            "e2el": trace.e2e_s,
        }
        return all(1000 * seconds[name] <= limit for name, limit in self.limits.items())

    def __str__(self) -> str:
        return " ".join(f"{name}:{limit:g}" for name, limit in self.limits.items())


def slo_limits(text: str) -> dict[str, float]:
    """Return the limits in a text such as "ttft:200,itl:50", for argparse."""
    return dict(map(_slo_limit, text.split(",")))


def _slo_limit(text: str) -> tuple[str, float]:
    name, colon, number = text.partition(":")
    try:
        limit = float(number)
    except ValueError:
        limit = 0.0
    if name not in LIMITS or not colon or not 0 < limit < float("inf"):
        raise argparse.ArgumentTypeError(
            f"must be NAME:MILLISECONDS with a name of {', '.join(LIMITS)}, such as ttft:500, got {text!r}"
        )
    return name, limit


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p95 and p99; zeros for no values."""
    points = np.percentile(values, PERCENTILES).tolist() if values else [0.0] * len(PERCENTILES)
    return {f"p{percent}": point for percent, point in zip(PERCENTILES, points, strict=True)}


def summarize(
    good: Sequence[Trace], wall_s: float, *, num_requests: int, prompt_tokens: int, slo: Slo | None = None
) -> dict[str, Any]:
    """Return the JSON output; with ``slo`` also the goodput."""
    generated = sum(trace.times.num_tokens for trace in good)
    result = {
        "bench": "serve",
        "requests": num_requests,
        "failed": num_requests - len(good),
        "wall_s": wall_s,
        "output_tokens_per_s": generated / wall_s,
        "total_tokens_per_s": (generated + prompt_tokens * len(good)) / wall_s,
        "ttft_s": percentiles([trace.times.ttft_s for trace in good]),
        "itl_s": percentiles([gap for trace in good for gap in trace.times.gaps_s]),
        "e2e_s": percentiles([trace.e2e_s for trace in good]),
        "cached_tokens": sum(trace.cached_tokens for trace in good),
    }
    if slo is not None:
        kept = sum(map(slo.kept_by, good))
        result |= {"slo": str(slo), "good_requests": kept, "goodput": kept / wall_s}
    return result


def print_table(result: dict[str, Any]) -> None:
    print(
        f"{result['requests']} requests, {result['failed']} failed, in {result['wall_s']:.2f} s: "
        f"{result['output_tokens_per_s']:.1f} output tokens/s, {result['total_tokens_per_s']:.1f} in all, "
        f"{result['cached_tokens']} prompt tokens from the cache"
    )
    print(f"{'':24}{'p50':>10}{'p95':>10}{'p99':>10}")
    for key, name in (
        ("ttft_s", "time to first token"),
        ("itl_s", "between tokens"),
        ("e2e_s", "whole request"),
    ):
        cells = "".join(f"{1000 * value:>7.1f} ms" for value in result[key].values())
        print(f"{name:24}{cells}")
    if "slo" in result:
        print(
            f"goodput: {result['goodput']:.2f} requests/s kept {result['slo']} "
            f"({result['good_requests']} of {result['requests']})"
        )


def draw_latencies(good: Sequence[Trace], path: Path) -> None:
    series = {
        "time to first token": [trace.times.ttft_s for trace in good],
        "between tokens": [gap for trace in good for gap in trace.times.gaps_s],
        "whole request": [trace.e2e_s for trace in good],
    }
    with picture(path, columns=3, share_y=True) as axes:
        for axis, (name, values) in zip(axes, series.items(), strict=True):
            axis.plot(np.sort(values), np.linspace(0, 1, len(values)))
            axis.set(title=name, xlabel="seconds")
        axes[0].set_ylabel("share of all")
