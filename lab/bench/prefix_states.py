"""``octavo bench prefix`` for recurrent layers: hits by snapshot policy and number of snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from octavo.block_manager import RecurrentState

from ..cache_sim.states import POLICIES
from .prefix_runs import Bench, Chats, converse


def trials(states: RecurrentState, chats: Chats) -> Iterator[tuple[str, RecurrentState]]:
    """Yield every policy with a quarter to three snapshots per conversation, if the slots suffice."""
    wanted = {max(1, chats.conversations * quarters // 4) for quarters in (1, 2, 4, 8, 12)}
    for name, policy in POLICIES.items():
        for count in sorted(wanted):
            if count < states.num_slots:
                yield name, replace(states, num_slots=1 + count, **policy)


def by_snapshots(
    bench: Bench,
    chats: Chats,
    num_pages: int,
    chosen: list[tuple[str, RecurrentState]],
    done: Callable[[], object],
) -> list[dict[str, Any]]:
    return [
        {
            "snapshots": name,
            "num_snapshots": states.num_slots - 1,
            "snapshot_bytes": (states.num_slots - 1) * states.slot_bytes,
            **converse(bench, chats, num_pages, states=states, done=done).to_json(),
        }
        for name, states in chosen
    ]
