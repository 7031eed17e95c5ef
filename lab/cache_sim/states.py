"""Prefix-cache hits of a model with recurrent layers, by snapshot policy and memory for snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.block_manager import RecurrentState
from octavo.engine.api.errors import InvalidRequest

from ..plots.figure import log_ticks, picture
from .run import replay
from .trace import TraceRequest

SHARES = (0.01, 0.125, 0.25, 0.5, 0.75)  # shares of the memory that slots get
SIZES = (8, 4, 2, 1)  # memory sizes: the whole memory divided by each number
ATTENTION = "none needed"


_ALL = {"tail": True, "branch": True, "demote_earlier": True, "every_page": False}
POLICIES: dict[str, dict[str, Any]] = {
    "tail and junction": _ALL,
    "without stepping down": _ALL | {"demote_earlier": False},
    "tail": _ALL | {"branch": False},
    "every page": _ALL | {"every_page": True},
    "none": _ALL | {"tail": False, "branch": False},
}
"""Snapshot policies: fields of ``RecurrentState``."""


@dataclass(frozen=True, slots=True)
class StateRow:
    """Result of one replay.

    snapshots   name of a policy, or "none needed" (attention alone)
    share       share of ``num_bytes`` that slots get
    """

    snapshots: str
    num_bytes: int
    share: float
    num_pages: int
    num_slots: int
    hit_ratio: float
    of_attention: float


def compare_states(
    requests: Sequence[TraceRequest],
    num_pages: int,
    *,
    page_bytes: int,
    state_bytes: int,
    shares: Sequence[float] = SHARES,
    sizes: Sequence[int] = (1,),
) -> list[StateRow]:
    """Replay a trace in the memory of ``num_pages`` pages, divided between pages and slots in several ways.

    sizes   divisors of the memory; all replays are repeated for each

    Raises InvalidRequest if the largest share cannot hold two states.
    """
    budget = num_pages * page_bytes
    if int(budget * max(shares)) < 2 * state_bytes:
        raise InvalidRequest(
            f"{num_pages} pages of {page_bytes} bytes have no room for two states of {state_bytes} bytes in "
            f"{max(shares):.0%} of them; raise --num-pages"
        )
    rows = []
    for size in sizes:
        num_bytes = budget // size
        dense = replay(requests, num_bytes // page_bytes).hit_ratio
        rows.append(StateRow(ATTENTION, num_bytes, 0.0, num_bytes // page_bytes, 0, dense, 1.0))
        for name, policy in POLICIES.items():
            takes_any = policy["tail"] or policy["branch"] or policy["every_page"]
            for share in shares if takes_any else shares[:1]:
                slots = int(num_bytes * share) // state_bytes
                pages = (num_bytes - slots * state_bytes) // page_bytes
                if slots < 2 or not pages:
                    continue
                states = RecurrentState(
                    num_slots=slots, slot_bytes=state_bytes, page_bytes=page_bytes, **policy
                )
                found = replay(requests, pages, states=states).hit_ratio
                rows.append(
                    StateRow(name, num_bytes, share, pages, slots, found, found / dense if dense else 0)
                )
    return rows


def render_states(rows: Sequence[StateRow]) -> str:
    lines = [
        f"{'snapshots':<26}{'MiB':>10}{'share':>8}{'pages':>10}{'slots':>8}{'found':>10}{'of attention':>14}"
    ]
    lines += [
        f"{row.snapshots:<26}{row.num_bytes / 2**20:>10,.0f}{row.share:>8.1%}{row.num_pages:>10}"
        f"{row.num_slots:>8}{row.hit_ratio:>10.2%}{row.of_attention:>14.1%}"
        for row in rows
    ]
    return "\n".join(lines)


def plot_states(rows: Sequence[StateRow], path: Path) -> None:
    """Draw hits against bytes: a line for each policy, with its best share at each size."""
    with picture(path) as (axis,):
        sizes = sorted({row.num_bytes for row in rows})
        for name in (ATTENTION, *POLICIES):
            best = {
                size: max(row.hit_ratio for row in rows if (row.snapshots, row.num_bytes) == (name, size))
                for size in sizes
                if any((row.snapshots, row.num_bytes) == (name, size) for row in rows)
            }
            label = "attention alone" if name == ATTENTION else name
            axis.plot(
                [size >> 20 for size in best], [100 * ratio for ratio in best.values()], "o-", label=label
            )
        log_ticks(axis, [size >> 20 for size in sizes])
        axis.set(xlabel="pages and slots together, MiB", ylabel="pages of prompts found, %")
        axis.set_title("what a cache with recurrent states finds")
        axis.legend(fontsize="small")
