"""Grammars that take seconds to minutes to compile, sent by callers that disconnect early."""

from __future__ import annotations

import asyncio
import json

from octavo.proto import generation_pb2 as pb

from ..attack import Attack, Seen, Target, count, request_of


def joined_terminals(number: int) -> str:
    """Return a grammar that intersects terminals, so that its automaton has exponentially many states."""
    terminals = "\n".join(f"T{index}: /(.|\\n)*[a-z]{{{index + 2}}}(.|\\n)*/" for index in range(number))
    return f"start: {' & '.join(f'T{index}' for index in range(number))}\n{terminals}\n"


def sources() -> list[pb.Structured]:
    schema = {
        "type": "object",
        "properties": {f"property_{number}": {"type": "string"} for number in range(6000)},
        "additionalProperties": False,
    }
    tags = [{"begin": f"<f{number}>", "schema": {"type": "integer"}, "end": "</f>"} for number in range(2000)]
    rules = "\n".join(f'r{number} ::= "a" | "b" r{number + 1}' for number in range(9000))
    return [
        pb.Structured(grammar=joined_terminals(39)),
        pb.Structured(regex="(?:a*)*" * 10_000),
        pb.Structured(json_schema=json.dumps(schema)),
        pb.Structured(
            structural_tag=json.dumps({"type": "structural_tag", "triggers": ["<f"], "structures": tags})
        ),
        pb.Structured(grammar=f'root ::= r0\n{rules}\nr9000 ::= "a"\n'),
    ]


async def attack(target: Target, seen: Seen) -> None:
    async with target.generation() as stub:
        calls = [
            stub.Generate(
                request_of(max_tokens=4, structured=structured),
                metadata=target.metadata,
                timeout=target.seconds,
            )
            for structured in sources()
            for _ in range(2)
        ]
        await asyncio.gather(*(count(seen, call) for call in calls))


ATTACK = Attack(name="slow-grammars", finding="A2", run=attack)
