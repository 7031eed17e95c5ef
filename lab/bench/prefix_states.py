"""``octavo bench prefix`` for recurrent layers: hits by snapshot policy and number of snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from octavo.block_manager import RecurrentState

from ..cache_sim.states import POLICIES
from .prefix_runs import Bench, Chats, converse


@dataclass(frozen=True, slots=True)
class Trial:
    snapshots: str
    num_snapshots: int
    states: RecurrentState

    @property
    def num_bytes(self) -> int:
        return self.num_snapshots * self.states.slot_bytes


def trials(states: RecurrentState, chats: Chats) -> Iterator[Trial]:
    """Yield every policy with a quarter to three snapshots per conversation, if the slots suffice."""
    most = states.num_slots - 1
    wanted = {max(1, chats.conversations * quarters // 4) for quarters in (1, 2, 4, 8, 12)}
    for name, policy in POLICIES.items():
        for count in sorted(wanted):
            if count <= most:
                chosen = replace(
                    states,
                    num_slots=1 + count,
                    every_page=policy.every_page,
                    tail=policy.tail,
                    branch=policy.branch,
                    demote_earlier=policy.demote_earlier,
                )
                yield Trial(name, count, chosen)


def by_snapshots(
    bench: Bench, chats: Chats, num_pages: int, chosen: list[Trial], done: Callable[[], object]
) -> list[dict[str, Any]]:
    return [
        {
            "snapshots": trial.snapshots,
            "num_snapshots": trial.num_snapshots,
            "snapshot_bytes": trial.num_bytes,
            **converse(bench, chats, num_pages, states=trial.states, done=done).to_json(),
        }
        for trial in chosen
    ]
