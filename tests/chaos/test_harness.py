from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos import honest, observer, soak
from chaos.attack import Target
from chaos.attacks import ATTACKS, BY_CLIENTS
from chaos.honest import Answer, HonestLoad, Request
from chaos.run import run_attackers
from chaos.setups import Folder, small_disk
from chaos.verdict import Bounds, Phase
from octavo.engine.api.sampling_params import SamplingParams
from served import eventually, served

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


def test_delays_of_the_client_do_not_count_as_stalls() -> None:
    phase = calm()
    stall(phase)
    phase.honest.late = [0.0] * 200 + [0.06]
    phase.judge(Bounds(), quiet_p99=0.01)
    assert phase.wrong == []


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


async def test_an_attacker_runs_in_a_process_of_its_own() -> None:
    target = Target(
        address="127.0.0.1:1",
        http="127.0.0.1:2",
        metrics="127.0.0.1:3",
        token="t",
        operator_token="o",
        seconds=0.02,
    )
    assert Target.from_json(target.as_json()) == target
    seen = await run_attackers(["idle-cpu"], target)
    assert seen["rounds"] > 0


def test_every_attack_names_its_finding() -> None:
    assert len(ATTACKS) == len(BY_CLIENTS) + 3, "two attacks have the same name"
    assert all(attack.finding and attack.run.__module__.startswith("chaos.") for attack in BY_CLIENTS)


def test_a_small_disk_is_small(tmp_path: Path) -> None:
    launcher = small_disk(tmp_path, size="1m")
    if launcher is None:
        pytest.skip("this kernel lets nobody mount a small file system")
    command = [*launcher, "dd", "if=/dev/zero", f"of={tmp_path}/file", "bs=1M", "count=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "No space left" in done.stderr
    assert not list(tmp_path.iterdir()), "it is the command's alone"


async def test_the_observer_notices_a_dead_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "PROBE_S", 0.01)
    watcher = observer.Observer(os.getpid(), "127.0.0.1:1")
    watcher.start()
    await eventually(lambda: bool(watcher.wrong and watcher.memory.peak), "probed and measured")
    await watcher.stop()
    assert watcher.memory.peak >= watcher.memory.before // 2 > 0
    assert len(watcher.wrong) == 1
    assert watcher.wrong[0].startswith("/healthz: ")


async def test_the_observer_finds_resources_held_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ['octavo_holders{kind="calls"} 0.0', 'octavo_holders{kind="pinned_pages"} 5.0']
    watcher = observer.Observer(os.getpid(), "127.0.0.1:1")
    monkeypatch.setattr(observer, "_fetch", lambda _: "\n".join(lines))
    assert await watcher.at_rest(patience=0.0) == []
    lines.append('octavo_holders{kind="state_slots"} 15.0')
    assert await watcher.at_rest(patience=0.0) == ["15 state_slots are held at rest"]


def test_growth_is_that_of_a_process_after_warm_up() -> None:
    def grown(server: Callable[[int], int], helper: Callable[[int], int]) -> list[float]:
        samples = [soak.Sample(float(at), server(at) << 20, helper(at) << 20) for at in range(101)]
        return [soak.Run("demo", memory=samples).growth_mib(each, 100.0) for each in soak.PROCESSES]

    assert grown(lambda at: 100 + min(at, 30) * 2, lambda _: 0) == [0.0, 0.0]
    assert grown(lambda _: 100, lambda at: 13 * (at % 3 == 0)) == [0.0, 0.0]
    server, helper = grown(lambda at: 100 + at, lambda at: 200 + 2 * at)
    assert 50 < server < 70
    assert 100 < helper < 140


@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not tell memory of files from other memory"
)
def test_a_sample_leaves_out_pages_of_files(tmp_path: Path) -> None:
    size, file = 64 << 20, tmp_path / "file"
    file.write_bytes(bytes(size))
    before = soak.sample_of(os.getpid(), 0.0)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert not any(mapped[::4096])
        touched = soak.sample_of(os.getpid(), 0.0)
    assert touched.server < before.server + size // 2
    kept = bytearray(b"x") * size
    assert soak.sample_of(os.getpid(), 0.0).server > before.server + len(kept) // 2
    helper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert soak.sample_of(os.getpid(), 0.0).helper > 0
    finally:
        helper.communicate()
