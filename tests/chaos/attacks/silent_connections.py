"""Hundreds of connections that send nothing, and some that send invalid bytes."""

from __future__ import annotations

import asyncio
import random

from ..attack import Attack, Seen, Target

CONNECTIONS = 400


async def attack(target: Target, seen: Seen) -> None:
    host, _, port = target.address.rpartition(":")
    rng = random.Random(1)
    writers = []
    for number in range(CONNECTIONS):
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            seen["not connected"] += 1
            continue
        writers.append(writer)
        if number % 4 == 0:
            writer.write(rng.randbytes(2000))
        seen["connected"] += 1
    await asyncio.sleep(target.seconds)
    for writer in writers:
        writer.close()


ATTACK = Attack(name="silent-connections", finding="E1", run=attack)
