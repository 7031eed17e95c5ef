from __future__ import annotations

from pathlib import Path
from typing import Any

from .figure import log_ticks, picture

WIDTH = 0.35


def plot(result: dict[str, Any], path: Path) -> None:
    panels = {
        "ttft": _draw_ttft,
        "pools": _draw_pools,
        "salts": _draw_salts,
        "cost": _draw_cost,
        "states": _draw_states,
    }
    drawn = [draw for name, draw in panels.items() if result.get(name)]
    columns, rows = min(max(len(drawn), 1), 2), max(-(-len(drawn) // 2), 1)
    with picture(path, columns=columns, rows=rows) as axes:
        for draw, axis in zip(drawn, axes, strict=False):
            draw(axis, result)
        for axis in axes[len(drawn) :]:
            axis.set_visible(False)
        axes[0].figure.suptitle(
            f"{result['model']}, {result['kv_format']} pages, {result['backend']} backend"
        )


def _draw_ttft(axis: Any, result: dict[str, Any]) -> None:
    rows = result["ttft"]
    lengths = [row["prefix_tokens"] for row in rows]
    for name in ("cold", "warm"):
        axis.plot(lengths, [1000 * row[f"{name}_s"] for row in rows], "o-", label=name)
    for row in rows:
        axis.annotate(
            f"1/{1 / row['warm_share']:.0f}",
            (row["prefix_tokens"], 1000 * row["warm_s"]),
            textcoords="offset points",
            xytext=(0, 7),
            ha="center",
        )
    log_ticks(axis, lengths)
    axis.set(yscale="log", xlabel="shared prefix, tokens", ylabel="time to first token, ms")
    axis.set_title("prefix cold and warm")
    axis.legend()


def _draw_pools(axis: Any, result: dict[str, Any]) -> None:
    rows, seconds = result["pools"], axis.twinx()
    sizes = [row["num_pages"] for row in rows]
    axis.plot(sizes, [100 * row["hit_ratio"] for row in rows], "o-", label="tokens found (left)")
    seconds.plot(sizes, [1000 * row["ttft_s"] for row in rows], "C1s-", label="later turns (right)")
    without = 1000 * result["cache_off"]["ttft_s"]
    seconds.axhline(without, color="C1", linestyle="--", label="without the cache (right)")
    axis.set(xlabel="pages in the pool", ylabel="prompt tokens found, %", ylim=(0, 100))
    seconds.set(ylabel="time to first token, ms", ylim=(0, 1.2 * max(without, *seconds.lines[0].get_ydata())))
    axis.set_title("conversations in rotation")
    axis.legend(handles=[*axis.lines, *seconds.lines], loc="lower left", fontsize="small")


def _draw_salts(axis: Any, result: dict[str, Any]) -> None:
    rows = {
        "one salt": result["salts"]["shared"],
        "a salt for each\nconversation": result["salts"]["per_conversation"],
    }
    if "cache_off" in result:
        rows["without\nthe cache"] = result["cache_off"]
    places, seconds = range(len(rows)), axis.twinx()
    left = [place - WIDTH / 2 for place in places]
    right = [place + WIDTH / 2 for place in places]
    found = axis.bar(left, [100 * row["hit_ratio"] for row in rows.values()], WIDTH, color="C0")
    times = seconds.bar(right, [1000 * row["ttft_s"] for row in rows.values()], WIDTH, color="C1")
    axis.bar_label(found, fmt="%.0f %%", padding=2)
    seconds.bar_label(times, fmt="%.1f ms", padding=2)
    axis.set_xticks(list(places), list(rows))
    axis.set(ylabel="prompt tokens found, %", ylim=(0, 130))
    seconds.set(ylabel="time to first token, ms")
    seconds.margins(y=0.3)
    axis.set_title("conversations with and without salts")
    axis.legend(
        [found, times], ["tokens found (left)", "later turns (right)"], loc="upper left", fontsize="small"
    )


def _draw_cost(axis: Any, result: dict[str, Any]) -> None:
    cost = result["cost"]
    low, high = cost["cost_interval"]
    control = cost["control"]
    rows = {
        "cache on\nagainst off": (cost["cost"], low, high),
        "off against\nitself": (control["median"], control["low"], control["high"]),
    }
    for place, (median, least, most) in enumerate(rows.values()):
        errors = [[100 * (median - least)], [100 * (most - median)]]
        axis.errorbar(place, 100 * median, yerr=errors, fmt="o", capsize=8)
        axis.annotate(
            f"{100 * median:+.2f} %", (place, 100 * median), textcoords="offset points", xytext=(10, -4)
        )
    axis.axhline(0, color="gray", linewidth=0.8)
    axis.set_xticks(range(len(rows)), list(rows))
    axis.set(xlim=(-0.5, len(rows) - 0.3), ylabel="time more, %")
    axis.set_title(f"prompts that share nothing ({cost['rounds']} pairs, 90 % intervals)")


def _draw_states(axis: Any, result: dict[str, Any]) -> None:
    rows = result["states"]
    for name in dict.fromkeys(row["snapshots"] for row in rows):
        own = [row for row in rows if row["snapshots"] == name]
        axis.plot(
            [row["snapshot_bytes"] / 2**20 for row in own],
            [100 * row["hit_ratio"] for row in own],
            "o-",
            label=name,
        )
    axis.set(xlabel="room for snapshots, MiB", ylabel="prompt tokens found, %", ylim=(0, 100))
    axis.set_title("conversations by snapshots taken")
    axis.legend(fontsize="small")
