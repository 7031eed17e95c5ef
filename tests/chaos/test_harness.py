from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos import honest, observer
from chaos.attacks import ATTACKS, BY_CLIENTS
from chaos.honest import Answer, HonestLoad, Request
from chaos.setups import Folder
from chaos.verdict import Bounds, Phase
from octavo.engine.api.sampling_params import SamplingParams
from served import served

IDS = Request("ids", "bob", [3, 1, 4, 1, 5], SamplingParams(max_tokens=6, ignore_eos=True))


def calm() -> Phase:
    phase = Phase("calm", "-")
    phase.honest.gaps, phase.honest.first, phase.honest.answers = [0.01] * 200, [0.1], 3
    phase.memory.before = phase.memory.peak = phase.memory.after = 100 << 20
    phase.worst_probe = 0.01
    return phase


def slow_tail(phase: Phase) -> None:
    phase.honest.gaps += [0.1] * 10


def stall(phase: Phase) -> None:
    phase.honest.gaps.append(0.3)


def slow_start(phase: Phase) -> None:
    phase.honest.first.append(11.0)


def slow_probe(phase: Phase) -> None:
    phase.worst_probe = 2.5


def keep(phase: Phase) -> None:
    phase.memory.after += 65 << 20


def swell(phase: Phase) -> None:
    phase.memory.peak += 257 << 20


def fail(phase: Phase) -> None:
    phase.seen["INTERNAL"] += 1


def differ(phase: Phase) -> None:
    phase.honest.wrong.append("ids: other tokens")


def test_a_calm_phase_holds() -> None:
    phase = calm()
    phase.judge(Bounds(), quiet_p99=0.01)
    assert phase.wrong == []
    assert phase.line().endswith("held")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (slow_tail, "p99 gap 100 ms, 50 are allowed"),
        (stall, "stall 300 ms, 250 are allowed"),
        (slow_start, "first token 11000 ms"),
        (slow_probe, "/healthz 2500 ms"),
        (keep, "kept 65 MiB, 64 are allowed"),
        (swell, "took 257 MiB, 256 are allowed"),
        (fail, "the server's own errors: INTERNAL"),
        (differ, "ids: other tokens"),
    ],
)
def test_each_bound_is_checked(harm: Callable[[Phase], None], words: str) -> None:
    phase = calm()
    harm(phase)
    phase.judge(Bounds(), quiet_p99=0.01)
    (wrong,) = phase.wrong
    assert words in wrong
    assert phase.line().endswith("FAILED")
    assert phase.as_json()["violations"] == [wrong]


async def test_honest_streams_are_compared_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(honest, "REQUESTS", (IDS,))
    monkeypatch.setattr(honest, "PAUSE_S", 0.0)
    folder = Folder.make(tmp_path)

    async def ask(address: str, expected: dict[str, Answer]) -> honest.Experience:
        load = HonestLoad(folder, address, expected)
        load.start()
        await asyncio.sleep(0.1)
        return await load.stop()

    async with served() as server:
        recorded: dict[str, Answer] = {}
        quiet = await ask(server.address, recorded)
        assert quiet.wrong == []
        assert quiet.answers >= 1
        assert len(recorded["ids"].token_ids) == 6
        again = await ask(server.address, recorded)
        assert again.wrong == []
        ids = recorded["ids"].token_ids
        other = Answer((*ids[:5], ids[5] + 1), recorded["ids"].text, (), recorded["ids"].finish_reason)
        changed = await ask(server.address, {"ids": other})
        assert changed.wrong == ["ids: other tokens than in the quiet run, from token 5 (finished by length)"]
    gone = await ask(server.address, recorded)
    assert len(gone.wrong) == 1
    assert gone.wrong[0].startswith("ids: EngineDead")


def test_every_attack_names_its_finding() -> None:
    assert len(ATTACKS) == len(BY_CLIENTS) + 3, "two attacks have the same name"
    assert all(attack.finding and attack.run.__module__.startswith("chaos.") for attack in BY_CLIENTS)


async def test_the_observer_finds_resources_held_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ['octavo_holders{kind="calls"} 0.0', 'octavo_holders{kind="pinned_pages"} 5.0']
    watcher = observer.Observer(os.getpid(), "127.0.0.1:1")
    monkeypatch.setattr(observer, "_fetch", lambda _: "\n".join(lines))
    assert await watcher.at_rest(patience=0.0) == []
    lines.append('octavo_holders{kind="state_slots"} 15.0')
    assert await watcher.at_rest(patience=0.0) == ["15 state_slots are held at rest"]
