"""What the prefix cache finds of a model with recurrent layers, by what of a budget goes to snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.block_manager import RecurrentState

from ..api.errors import InvalidRequest
from .run import replay
from .trace import TraceRequest

SHARES = (0.125, 0.25, 0.5, 0.75)  # of the bytes, for slots


@dataclass(frozen=True, slots=True)
class StateRow:
    """One replay. ``snapshots``: "none needed" (attention alone), "tail and junction", or "every page"."""

    snapshots: str
    share: float
    num_pages: int
    num_slots: int
    hit_ratio: float


def compare_states(
    requests: Sequence[TraceRequest], num_pages: int, *, page_bytes: int, state_bytes: int
) -> list[StateRow]:
    """Replay a trace with the bytes of ``num_pages`` pages, shared between pages and slots in several ways.

    InvalidRequest if not two states fit into the largest share.
    """
    budget = num_pages * page_bytes
    if int(budget * max(SHARES)) < 2 * state_bytes:
        raise InvalidRequest(
            f"{num_pages} pages of {page_bytes} bytes have no room for two states of {state_bytes} bytes; "
            "give more --num-pages"
        )
    rows = [StateRow("none needed", 0.0, num_pages, 0, replay(requests, num_pages).hit_ratio)]
    for every_page in (False, True):
        name = "every page" if every_page else "tail and junction"
        for share in SHARES:
            slots = int(budget * share) // state_bytes
            pages = (budget - slots * state_bytes) // page_bytes
            if slots < 2 or not pages:
                continue
            states = RecurrentState(num_slots=slots, slot_bytes=state_bytes, every_page=every_page)
            found = replay(requests, pages, states=states)
            rows.append(StateRow(name, share, pages, slots, found.hit_ratio))
    return rows


def render(rows: Sequence[StateRow]) -> str:
    """A table for people."""
    lines = [f"{'snapshots':<20}{'share':>8}{'pages':>10}{'slots':>8}{'found':>10}"]
    lines += [
        f"{row.snapshots:<20}{row.share:>8.1%}{row.num_pages:>10}{row.num_slots:>8}{row.hit_ratio:>10.2%}"
        for row in rows
    ]
    return "\n".join(lines)
