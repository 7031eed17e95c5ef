from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from .attack import Target
from .honest import Answer, HonestLoad, quantile
from .observer import Observer
from .setups import Folder, Server
from .verdict import Bounds, Phase

SETTLE_S = 8.0  # seconds after an attack until memory must be returned
ATTACK_PATIENCE_S = 60.0  # seconds until an attacker's process is killed


class Chaos:
    def __init__(self, folder: Folder, bounds: Bounds) -> None:
        self.folder = folder
        self.bounds = bounds
        self.phases: list[Phase] = []
        self.answers: dict[str, dict[str, Answer]] = {}
        self.quiet_p99: dict[str, float] = {}

    @contextlib.asynccontextmanager
    async def phase(self, server: Server, setup: str, name: str, finding: str) -> AsyncIterator[Phase]:
        phase = Phase(name, finding)
        load = HonestLoad(self.folder, server.address, self.answers.setdefault(setup, {}))
        observer = Observer(server.process.pid, server.metrics)
        load.start()
        observer.start()
        try:
            yield phase
        finally:
            phase.honest = await load.stop()
            await observer.settle(allowed=self.bounds.kept, patience=SETTLE_S)
            if server.runs:
                phase.wrong += await observer.at_rest(patience=SETTLE_S)
            await observer.stop()
            phase.memory, phase.worst_probe = observer.memory, observer.worst_probe
            phase.wrong += observer.wrong
            if not server.runs:
                phase.memory.after = phase.memory.before
                phase.wrong.insert(0, server.dead_error())
        quiet = self.quiet_p99.setdefault(setup, quantile(phase.honest.gaps, 0.99))
        phase.judge(self.bounds, quiet_p99=quiet)
        self.add(phase)

    def add(self, phase: Phase) -> None:
        self.phases.append(phase)
        print(phase.line(), flush=True)
        for wrong in phase.wrong:
            print(f"    {wrong}", flush=True)

    async def quiet(self, server: Server, setup: str, *, seconds: float) -> None:
        warm = HonestLoad(self.folder, server.address, self.answers.setdefault(setup, {}))
        warm.start()
        await run_attackers(["fill-pool"], server.target(0.0))
        await warm.stop()
        async with self.phase(server, setup, f"quiet ({setup})", "-"):
            await run_attackers(["idle-cpu"], server.target(seconds))


async def run_attackers(names: Sequence[str], target: Target) -> Counter[str]:
    """Run attacks at once, each in a niced process; return how their calls ended."""
    found: Counter[str] = Counter()
    for seen in await asyncio.gather(*(_run_attacker(name, target) for name in names)):
        found += seen
    return found


async def _run_attacker(name: str, target: Target) -> Counter[str]:
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests / "support"), os.environ.get("PYTHONPATH", "")])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "chaos.attacker",
        name,
        target.as_json(),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path, "GRPC_VERBOSITY": "NONE"},
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), ATTACK_PATIENCE_S)
    except TimeoutError:
        return Counter({"attacker still waiting": 1})
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = out.decode().splitlines()
    if process.returncode != 0 or not lines:
        raise RuntimeError(f"the attacker {name} failed with {process.returncode}; its words are above")
    return Counter(json.loads(lines[-1]))
