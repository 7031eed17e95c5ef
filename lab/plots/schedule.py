from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .figure import picture

OVER_TIME = {
    "service_gap": "service of two waiting tenants apart, tokens",
    "longest_wait_s": "longest wait for a first token, s",
    "preemptions": "preemptions so far",
}


def plot(outcomes: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Draw times to first token, fairness, waits and preemptions, with a line for each outcome."""
    with picture(path, columns=2, rows=2) as axes:
        for label, lines in outcomes.items():
            times = sorted(lines["ttft_s"])
            axes[0].plot(times, [100 * (n + 1) / len(times) for n in range(len(times))], label=label)
            for axis, name in zip(axes[1:], OVER_TIME, strict=True):
                axis.plot(lines["at_s"], lines[name], label=label)
        axes[0].set(xlabel="time to first token, s", ylabel="requests, %", ylim=(0, 100))
        for axis, ylabel in zip(axes[1:], OVER_TIME.values(), strict=True):
            axis.set(xlabel="time, s", ylabel=ylabel)
        for axis in axes:
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize=7)
