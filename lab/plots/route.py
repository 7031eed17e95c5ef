from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from .figure import picture


def plot(result: dict[str, Any], path: Path) -> None:
    policies = result["policies"]
    panels = {
        "prompt tokens found, %": lambda run: 100 * run["hit_ratio"],
        "median time to first token, ms": lambda run: 1000 * run["ttft_s"]["p50"],
        "output tokens/s": lambda run: run["output_tokens_per_s"],
    }
    with picture(path, columns=3) as axes:
        for axis, title in zip(axes, panels, strict=True):
            for place, runs in enumerate(policies.values()):
                values = [float(panels[title](run)) for run in runs]
                middle = statistics.median(values)
                errors = [[middle - min(values)], [max(values) - middle]]
                bar = axis.bar(place, middle, 0.6, yerr=errors, capsize=8)
                axis.bar_label(bar, fmt="%.1f", label_type="center")
            axis.set_xticks(range(len(policies)), list(policies))
            axis.set_title(title)
        axes[0].figure.suptitle(
            f"{result['requests']} requests, {result['workers']} workers; median and range of "
            f"{len(next(iter(policies.values())))} runs"
        )
