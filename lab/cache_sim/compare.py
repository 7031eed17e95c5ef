"""Comparison of all eviction policies and the offline optimum, at several pool sizes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from octavo.block_manager.policies import POLICIES

from .. import policies  # noqa: F401 (registers them)
from ..plots.figure import log_ticks, picture
from .optimum import optimal_hits
from .run import replay
from .trace import TraceRequest

SIZES = (300, 1000, 3000, 10_000, 30_000)
OPTIMUM = "optimum"


@dataclass(frozen=True, slots=True)
class Row:
    """Hit ratios of one workload at one pool size, by policy; ``OPTIMUM`` is one of the keys."""

    workload: str
    num_pages: int
    hit_ratios: dict[str, float]


def compare(workloads: Mapping[str, Sequence[TraceRequest]], sizes: Sequence[int] = SIZES) -> list[Row]:
    """Replay each workload at each pool size with each policy; add the hit ratios of the optimum."""
    rows = []
    todo = [(name, size) for name in workloads for size in sizes]
    for name, size in tqdm(todo, unit="size", disable=None, file=sys.stderr):
        requests = workloads[name]
        replays = {policy: replay(requests, size, policy=policy) for policy in POLICIES}
        ratios = {policy: replayed.hit_ratio for policy, replayed in replays.items()}
        prompt_pages = next(iter(replays.values())).prompt_pages
        ratios[OPTIMUM] = optimal_hits(requests, size) / max(prompt_pages, 1)
        rows.append(Row(name, size, ratios))
    return rows


def render(rows: Sequence[Row]) -> str:
    names = [*POLICIES, OPTIMUM]
    lines = [f"{'workload':24} {'pages':>7}" + "".join(f"{name:>10}" for name in names)]
    for row in rows:
        ratios = "".join(f"{row.hit_ratios[name]:>10.4f}" for name in names)
        lines.append(f"{row.workload:24} {row.num_pages:>7}{ratios}")
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    sizes = [row.num_pages for row in rows]
    with picture(path) as (axis,):
        for name in (*POLICIES, OPTIMUM):
            style, label = ("k--", "optimum (offline, knows the future)") if name == OPTIMUM else ("o-", name)
            axis.plot(sizes, [100 * row.hit_ratios[name] for row in rows], style, label=label)
        log_ticks(axis, sizes)
        axis.set(xlabel="pages in the pool", ylabel="pages found, %", title=rows[0].workload, ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
