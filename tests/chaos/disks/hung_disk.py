"""A disk that hangs: opening a page file never returns."""

from __future__ import annotations

import os

from ..run import Chaos, run_attackers
from ..setups import Server, started
from .shards import fill, shards

SECONDS = 8.0


async def run(chaos: Chaos) -> None:
    await fill(chaos)
    async with started(Server("disk", chaos.folder, disk=True)) as server:
        for path in shards(chaos.folder.cache):
            path.unlink()
            os.mkfifo(path)
        async with chaos.phase(server, "disk", "hung-disk", "D2") as phase:
            phase.seen = await run_attackers(["distinct-prompts"], server.target(SECONDS))
        phase.wrong += (wrong := await server.end())
        for each in wrong:
            print(f"    {each}", flush=True)
    for path in chaos.folder.cache.rglob("*.safetensors"):
        if path.is_fifo():
            path.unlink()
