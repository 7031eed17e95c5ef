"""A server that is killed with SIGKILL under load and restarted, three times."""

from __future__ import annotations

import asyncio

from ..honest import REQUESTS
from ..run import Chaos, run_attackers
from ..setups import Server, started
from .shards import fill

KILLS = 3
SECONDS = 3.0


async def run(chaos: Chaos) -> None:
    await fill(chaos)
    for _ in range(KILLS):
        async with started(Server("disk", chaos.folder, disk=True)) as server:
            attackers = asyncio.create_task(run_attackers(["distinct-prompts"], server.target(SECONDS)))
            async with chaos.folder.client(server.address, "alice") as client:
                stream = client.generate(REQUESTS[0].prompt, REQUESTS[0].params)
                await anext(stream)
                await asyncio.sleep(SECONDS / 2)
                await server.kill()
                await stream.aclose()
            await attackers
    async with started(Server("disk", chaos.folder, disk=True)) as server:
        async with chaos.phase(server, "disk", "killed", "G") as phase:
            async with chaos.folder.client(server.address, REQUESTS[1].tenant) as client:
                async for delta in client.generate(REQUESTS[1].prompt, REQUESTS[1].params):
                    cached = delta.cached_tokens
            if not cached:
                phase.wrong.append("after SIGKILL and a new start nothing of a prompt on disk was found")
            await asyncio.sleep(SECONDS)
        phase.wrong += (wrong := await server.end())
        for each in wrong:
            print(f"    {each}", flush=True)
