from __future__ import annotations

from pathlib import Path
from typing import Any

from .figure import picture


def plot(result: dict[str, Any], path: Path) -> None:
    rows = result["results"]
    batches = sorted({row["batch"] for row in rows})
    texts = list(dict.fromkeys(row["text"] for row in rows))
    width = 0.8 / len(batches)
    with picture(path) as (axis,):
        for number, batch in enumerate(batches):
            ratios = {row["text"]: row["ratio"] for row in rows if row["batch"] == batch}
            places = [place + number * width for place in range(len(texts))]
            bars = axis.bar(places, [ratios[text] for text in texts], width, label=f"{batch} at once")
            axis.bar_label(bars, fmt="%.2f", fontsize="small")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks([place + 0.4 - width / 2 for place in range(len(texts))], texts)
        axis.set_ylabel("tokens/s, times as many as without drafts")
        axis.set_title(f"{result['model']}, {result['weights']} weights, {result['backend']} backend")
        axis.legend()
