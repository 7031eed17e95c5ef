"""More requests of one tenant than may wait; other tenants' requests are not refused."""

from __future__ import annotations

import asyncio

from octavo.proto import generation_pb2 as pb

from ..attack import Attack, Seen, Target, count

AT_ONCE = 1500
WORDS = "tell me about everything that ever was, and then about the rest, please. " * 100


async def attack(target: Target, seen: Seen) -> None:
    async with target.generation() as stub:
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=WORDS)])
        request = pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(max_tokens=4))
        calls = [
            stub.Generate(request, metadata=target.metadata, timeout=2 * target.seconds)
            for _ in range(AT_ONCE)
        ]
        await asyncio.gather(*(count(seen, call) for call in calls))


ATTACK = Attack(name="queue-flood", finding="B2, C2, C3", run=attack)
