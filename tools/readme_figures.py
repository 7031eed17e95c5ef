"""Write the README's table and chart, and docs/supported-models.md, from data.

Run ``python tools/readme_figures.py`` (extra ``plot``).
"""

from __future__ import annotations

import statistics

import matplotlib as mpl

from docs_site import reference
from docs_site.benchmarks import CHART, README, Comparison, readme_result, readme_with

COLORS = {"Octavo": "#1f77b4", "OpenVINO": "#9aa5b1", "llama.cpp": "#c9b38c", "vLLM": "#b58fb0"}


def draw(result: Comparison, weights: str) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in result.rows if row["weights"] == weights]
    figure, axes = plt.subplots(1, len(result.columns), figsize=(11, 2.2), layout="constrained")
    for axis, (key, heading) in zip(axes, result.columns.items(), strict=True):
        names = [row["engine"] for row in reversed(rows)]
        values = [statistics.median(row[key] or [0]) for row in reversed(rows)]
        bars = axis.barh(names, values, color=[COLORS[name.partition(" ")[0]] for name in names])
        axis.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
        axis.set_title(heading.replace(", tokens/s", ""), fontsize=9)
        axis.set_xlim(0, max(values) * 1.25)
        axis.set_xticks([])
        axis.tick_params(labelsize=8, labelleft=axis is axes[0])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.suptitle(f"tokens/s, weights of {weights}; higher is better", fontsize=9)
    CHART.parent.mkdir(exist_ok=True)
    figure.savefig(CHART, dpi=110)


if __name__ == "__main__":
    result = readme_result()
    draw(result, "8 bits")
    README.write_text(readme_with(result))
    reference.MODELS.write_text(reference.models())
    print(f"written: {CHART}, {reference.MODELS} and the table of {README}")
