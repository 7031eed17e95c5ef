from __future__ import annotations

import asyncio
from pathlib import Path

from ..run import Chaos, run_attackers
from ..setups import Server, started

SHARD = "*.safetensors"


def shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob(SHARD) if path.is_file())


async def fill(chaos: Chaos) -> None:
    async with started(Server("disk", chaos.folder, disk=True)) as server:
        await chaos.quiet(server, "disk", seconds=2.0)
        await run_attackers(["distinct-prompts"], server.target(2.0))
        await asyncio.sleep(0.5)
        await server.end()
    if not shards(chaos.folder.cache):
        raise RuntimeError(
            f"no files {SHARD} in {chaos.folder.cache}: the phases of disks have nothing to harm"
        )
