"""A disk that is smaller than the cache budget."""

from __future__ import annotations

import asyncio

from ..run import Chaos, run_attackers
from ..setups import Server, small_disk, started
from ..verdict import Phase
from .shards import shards

NAME, FINDING, SIZE = "full-disk", "D3", "3m"
SECONDS = 8.0


async def run(chaos: Chaos) -> None:
    launcher = small_disk(chaos.folder.cache, size=SIZE)
    if launcher is None:
        skipped = Phase(NAME, FINDING)
        skipped.skipped = "this kernel lets nobody mount a small file system (unshare --user --mount)"
        chaos.add(skipped)
        return
    async with started(Server("disk", chaos.folder, launcher=launcher, disk=True)) as server:
        async with chaos.phase(server, "disk", NAME, FINDING) as phase:
            await run_attackers(["distinct-prompts"], server.target(SECONDS / 2))
            full = set(shards(server.seen_by_server(chaos.folder.cache)))
            phase.seen = await run_attackers(["distinct-prompts"], server.target(SECONDS / 2))
            await asyncio.sleep(0.5)
            if not set(shards(server.seen_by_server(chaos.folder.cache))) - full:
                phase.wrong.append(f"{len(full)} pages fill the disk, and no later one took a place")
        phase.wrong += (wrong := await server.end())
        for each in wrong:
            print(f"    {each}", flush=True)
