from __future__ import annotations

import asyncio

from octavo.proto import generation_pb2 as pb

from ..attack import Attack, Seen, Target, count

MEBIBYTE = "the quick brown fox jumps over a lazy dog, " * (2**20 // 43)


async def attack(target: Target, seen: Seen) -> None:
    async with target.generation() as stub:
        for text in (MEBIBYTE, MEBIBYTE * 4):
            chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=text)])
            calls = [
                stub.Generate(pb.GenerateRequest(text=text), metadata=target.metadata, timeout=20),
                stub.Generate(pb.GenerateRequest(chat=chat), metadata=target.metadata, timeout=20),
            ]
            await asyncio.gather(*(count(seen, call) for call in calls))
            calls = [
                stub.Tokenize(pb.TokenizeRequest(text=text), metadata=target.metadata, timeout=20)
                for _ in range(2)
            ]
            await asyncio.gather(*(count(seen, call) for call in calls))


ATTACK = Attack(name="giant-texts", finding="A3", run=attack)
