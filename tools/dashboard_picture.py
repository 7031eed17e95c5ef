"""Draw the dashboards from a live server: ``python tools/dashboard_picture.py [FOLDER]`` (extra ``plot``).

Starts ``octavo serve`` with the embedded model, a Prometheus that scrapes it, and a load that rises
and falls for about two minutes; then asks that Prometheus for every expression of every panel and
draws one PNG for each dashboard, by default beside the JSON in ``deploy/grafana``. What Grafana
itself would draw looks different; the numbers are the same.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dashboard_panels import DASHBOARDS, Kind, Page, Panel
from live_prometheus import DEPLOY, in_prometheus, live_prometheus, query
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.client.client import Client
from octavo.engine.client.server_process import ServerProcess
from octavo_lab.plots.figure import picture, require_matplotlib

STREAMS = (2, 6, 16, 4)  # clients at once, in each phase
PHASE_S = 35.0
SHOWN_S = 80  # the end of the load, when every rate has a full window
COLUMNS = 3
Series = list[tuple[str, list[float], list[float]]]  # legend, seconds, values


async def _converse(client: Client, number: int, until: float) -> None:
    """One client: conversations that share a system prompt and grow turn by turn."""
    turn = 0
    while time.monotonic() < until:
        history = [5 + i % 90 for i in range(64)] + [
            9 + (number + i) % 80 for i in range(48 * (1 + turn % 6))
        ]
        params = SamplingParams(max_tokens=24 + 8 * (number % 4), ignore_eos=True)
        async for _ in client.generate(history, params):
            pass
        turn += 1


async def _load(client: Client) -> None:
    for streams in STREAMS:
        until = time.monotonic() + PHASE_S
        await asyncio.gather(*(_converse(client, number, until) for number in range(streams)))


async def _series(address: str, panel: Panel, end: float) -> Series:
    found: Series = []
    for legend, expression in panel.series.items():
        span = {"start": f"{end - SHOWN_S:.0f}", "end": f"{end:.0f}", "step": "1"}
        data = await query(address, "query_range", query=in_prometheus(expression), **span)
        for result in data["result"]:
            name = legend
            for label, value in result["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            times = [float(at) - end for at, _ in result["values"]]
            found.append((name, times, [float(value) for _, value in result["values"]]))
    return found


def _draw(axes: Any, panel: Panel, series: Series) -> None:
    axes.set_title(panel.title, fontsize=9)
    axes.tick_params(labelsize=7)
    scale, unit = (100, "%") if panel.unit == "percentunit" else (1, {"none": ""}.get(panel.unit, panel.unit))
    axes.set_ylabel(unit, fontsize=7)
    if panel.kind is Kind.HEATMAP:
        series = _shares(series)
    if panel.kind is Kind.STACK and series:
        series = [one for one in series if any(one[2])] or series[:1]
        longest = max((times for _, times, _ in series), key=len)
        rows = [
            [dict(zip(times, values, strict=True)).get(t, 0.0) for t in longest]
            for _, times, values in series
        ]
        axes.stackplot(longest, rows, labels=[name for name, _, _ in series])
    else:
        for name, times, values in series:
            axes.plot(times, [scale * value for value in values], label=name or None, linewidth=1)
    axes.set_ylim(bottom=0)
    if any(name for name, _, _ in series):
        axes.legend(fontsize=6, loc="best")


def _shares(series: Series) -> Series:
    """Of cumulative buckets, the upper bounds that half and nearly all observations stay below."""
    by_bound = sorted((float(name), dict(zip(times, values, strict=True))) for name, times, values in series)
    instants = sorted(by_bound[-1][1])
    shares: Series = []
    for share in (0.5, 0.95):
        bounds = [
            next(bound for bound, rates in by_bound if rates.get(at, 0.0) >= share * by_bound[-1][1][at])
            for at in instants
        ]
        shares.append((f"bucket of {100 * share:.0f} %", instants, bounds))
    return shares


async def _draw_page(address: str, page: Page, end: float, folder: Path) -> Path:
    series = [await _series(address, panel, end) for panel in page.panels]
    path = folder / f"{page.uid}.png"
    rows = -(-len(page.panels) // COLUMNS)
    with picture(path, columns=COLUMNS, rows=rows, size=(4.0 * COLUMNS, 2.3 * rows), dpi=80) as grid:
        for axes, panel, found in zip(grid, page.panels, series, strict=False):
            _draw(axes, panel, found)
        for axes in grid[len(page.panels) :]:
            axes.set_axis_off()
    return path


async def draw(folder: Path) -> list[Path]:
    """One picture for each dashboard, from a load of STREAMS phases."""
    with tempfile.TemporaryDirectory() as scratch:
        flags = ["--num-pages", "96", "--max-running", "8", "--cache-dir", f"{scratch}/pages"]
        (data := Path(scratch) / "prometheus").mkdir()
        async with (
            ServerProcess([*flags, "--kv-format", "fp4"]) as server,
            Client(server.ready["grpc"]) as client,
            live_prometheus(server.ready["metrics"], data) as address,
        ):
            await _load(client)
            end = time.time()
            return [await _draw_page(address, page, end, folder) for page in DASHBOARDS]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEPLOY / "grafana"
    require_matplotlib(folder / "any.png")
    for path in asyncio.run(draw(folder)):
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
