"""Chains of thousands of rules or ``$ref``s, on which recursive compilers overflow the stack."""

from __future__ import annotations

import json
from typing import Any

from octavo.proto import generation_pb2 as pb

from ..attack import Attack, Seen, Target, count, request_of


def lark_chain(length: int) -> str:
    rules = "\n".join(f"r{number}: r{number + 1}" for number in range(length))
    return f'start: r0\n{rules}\nr{length}: "a"\n'


def gbnf_chain(length: int) -> str:
    rules = "\n".join(f"r{number} ::= r{number + 1}" for number in range(length))
    return f'root ::= r0\n{rules}\nr{length} ::= "a"\n'


def schema_chain(length: int, wrap: str) -> dict[str, Any]:
    def refer(number: int) -> dict[str, Any]:
        to: dict[str, Any] = {"$ref": f"#/$defs/d{number}"}
        match wrap:
            case "$ref":
                return to
            case "items":
                return {"type": "array", "items": to}
            case _:
                return {wrap: [to]}

    defs: dict[str, Any] = {f"d{number}": refer(number + 1) for number in range(length)}
    return {"$defs": defs | {f"d{length}": {"type": "integer"}}, **refer(0)}


def structural_tag(schema: dict[str, Any]) -> str:
    structures = [{"begin": "<f>", "schema": schema, "end": "</f>"}]
    return json.dumps({"type": "structural_tag", "triggers": ["<f"], "structures": structures})


def sources() -> list[pb.Structured]:
    schemas = [schema_chain(1600, "items"), schema_chain(4500, "$ref")]
    schemas += [schema_chain(3000, wrap) for wrap in ("allOf", "anyOf")]
    return [
        pb.Structured(grammar=lark_chain(3000)),
        pb.Structured(grammar=gbnf_chain(6000)),
        *(pb.Structured(json_schema=json.dumps(schema)) for schema in schemas),
        pb.Structured(structural_tag=structural_tag(schema_chain(1600, "items"))),
    ]


async def attack(target: Target, seen: Seen) -> None:
    async with target.generation() as stub:
        for structured in sources():
            request = request_of(max_tokens=4, structured=structured)
            await count(seen, stub.Generate(request, metadata=target.metadata, timeout=10))


ATTACK = Attack(name="rule-chains", finding="A1", run=attack)
