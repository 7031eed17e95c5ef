"""Page files that are cut, emptied or changed, before the start and while they are read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
from pathlib import Path

from ..run import Chaos, run_attackers
from ..setups import Server, started
from .shards import fill, shards

SECONDS = 8.0


def damage(path: Path, rng: random.Random) -> None:
    with contextlib.suppress(FileNotFoundError):
        size = path.stat().st_size
        match rng.randrange(4):
            case 0:
                os.truncate(path, size // 2)
            case 1:
                os.truncate(path, 0)
            case 2:
                path.write_bytes(rng.randbytes(size))
            case 3:
                with path.open("r+b") as file:
                    file.seek(size * 3 // 4)
                    file.write(rng.randbytes(8))


def _damage_some(folder: Path, rng: random.Random) -> None:
    found = shards(folder)
    for path in rng.sample(found, min(5, len(found))):
        damage(path, rng)


async def run(chaos: Chaos) -> None:
    await fill(chaos)
    rng = random.Random(3)
    for path in shards(chaos.folder.cache):
        if rng.random() < 0.5:
            damage(path, rng)
    async with started(Server("disk", chaos.folder, disk=True)) as server:
        async with chaos.phase(server, "disk", "damaged-shards", "D1, D6") as phase:
            attackers = asyncio.create_task(run_attackers(["distinct-prompts"], server.target(SECONDS)))
            while not attackers.done():
                await asyncio.to_thread(_damage_some, chaos.folder.cache, rng)
                await asyncio.sleep(0.2)
            phase.seen = await attackers
        phase.wrong += (wrong := await server.end())
        for each in wrong:
            print(f"    {each}", flush=True)
    shutil.rmtree(chaos.folder.cache)
    chaos.folder.cache.mkdir()
