"""Grammars that compile quickly but have slow masks: strings of thousands of characters."""

from __future__ import annotations

import asyncio
import time

from octavo.proto import generation_pb2 as pb

from ..attack import Attack, Seen, Target, count, request_of

CALLERS = 4


def literal(length: int) -> str:
    return f'root ::= "{"a" * length}"\n'


def behind_a_letter(length: int, number: int) -> str:
    strings = " ".join(f'"{"a" * length}"' for _ in range(number))
    return f'start: "x" T\nT: {strings}\n'


SOURCES = (literal(250_000), literal(16_000), behind_a_letter(16_000, 15), behind_a_letter(8_000, 4))


async def attack(target: Target, seen: Seen) -> None:
    end = time.monotonic() + target.seconds

    async def loop(grammar: str) -> None:
        async with target.generation() as stub:
            while time.monotonic() < end:
                request = request_of(max_tokens=500, structured=pb.Structured(grammar=grammar))
                await count(seen, stub.Generate(request, metadata=target.metadata, timeout=20))

    await asyncio.gather(*(loop(SOURCES[number % len(SOURCES)]) for number in range(CALLERS)))


# INTERNAL: only this request fails, because its grammar has become too costly.
ATTACK = Attack(name="costly-masks", finding="masks", run=attack, may_see=frozenset({"INTERNAL"}))
