"""Ambiguous grammars: each mask takes longer than the previous one."""

from __future__ import annotations

import asyncio

from octavo.proto import generation_pb2 as pb

from ..attack import Attack, Seen, Target, count, request_of

GRAMMARS = (
    'start: s\ns: s s s s | "a"?\n',
    'start: s\ns: s s | s s s | "a" | "b" |\n',
    'root ::= s\ns ::= s s s | "a" | ""\n',
)


async def attack(target: Target, seen: Seen) -> None:
    async with target.generation() as stub:
        calls = [
            stub.Generate(
                request_of(
                    max_tokens=2000,
                    n=4,
                    temperature=1.0,
                    logit_bias=dict.fromkeys(range(60, 100), 50.0),
                    structured=pb.Structured(grammar=grammar),
                ),
                metadata=target.metadata,
                timeout=target.seconds,
            )
            for grammar in GRAMMARS
        ]
        await asyncio.gather(*(count(seen, call) for call in calls))


# INTERNAL: only this request fails, because its grammar has become too costly.
ATTACK = Attack(name="ambiguous-grammars", finding="A5", run=attack, may_see=frozenset({"INTERNAL"}))
