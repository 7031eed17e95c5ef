"""Grammars and schemas that are slow to compile, to mask, or nest too deeply."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

from octavo.proto import generation_pb2 as pb

from ..attack import Seen, Target, attack, cancel_later, count, count_all, repeat, request_of

AMBIGUOUS = (  # each mask takes longer than the previous one
    'start: s\ns: s s s s | "a"?\n',
    'start: s\ns: s s | s s s | "a" | "b" |\n',
    'root ::= s\ns ::= s s s | "a" | ""\n',
)
TOO_COSTLY = "INTERNAL"  # only this request fails, because its grammar has become too costly


def _ambiguous(grammar: str, **sampling: Any) -> pb.GenerateRequest:
    return request_of(
        max_tokens=2000,
        temperature=1.0,
        logit_bias=dict.fromkeys(range(60, 100), 50.0),
        structured=pb.Structured(grammar=grammar),
        **sampling,
    )


def _structural_tag(structures: list[dict[str, Any]]) -> pb.Structured:
    tag = {"type": "structural_tag", "triggers": ["<f"], "structures": structures}
    return pb.Structured(structural_tag=json.dumps(tag))


def _gbnf(rules: list[str], length: int) -> str:
    return "\n".join(("root ::= r0", *rules, f'r{length} ::= "a"', ""))


def _schema_chain(length: int, wrap: str) -> dict[str, Any]:
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


def _chains() -> list[pb.Structured]:
    lark = "\n".join(f"r{number}: r{number + 1}" for number in range(3000))
    schemas = [_schema_chain(1600, "items"), _schema_chain(4500, "$ref")]
    schemas += [_schema_chain(3000, wrap) for wrap in ("allOf", "anyOf")]
    return [
        pb.Structured(grammar=f'start: r0\n{lark}\nr3000: "a"\n'),
        pb.Structured(grammar=_gbnf([f"r{number} ::= r{number + 1}" for number in range(6000)], 6000)),
        *(pb.Structured(json_schema=json.dumps(schema)) for schema in schemas),
        _structural_tag([{"begin": "<f>", "schema": schemas[0], "end": "</f>"}]),
    ]


def _joined_terminals(number: int) -> str:
    """Return a grammar that intersects terminals, so that its automaton has exponentially many states."""
    terminals = "\n".join(f"T{index}: /(.|\\n)*[a-z]{{{index + 2}}}(.|\\n)*/" for index in range(number))
    return f"start: {' & '.join(f'T{index}' for index in range(number))}\n{terminals}\n"


def _slow_to_compile() -> list[pb.Structured]:
    properties = {f"property_{number}": {"type": "string"} for number in range(6000)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    tags = [{"begin": f"<f{number}>", "schema": {"type": "integer"}, "end": "</f>"} for number in range(2000)]
    return [
        pb.Structured(grammar=_joined_terminals(39)),
        pb.Structured(regex="(?:a*)*" * 10_000),
        pb.Structured(json_schema=json.dumps(schema)),
        _structural_tag(tags),
        pb.Structured(grammar=_gbnf([f'r{at} ::= "a" | "b" r{at + 1}' for at in range(9000)], 9000)),
    ]


def _literal(length: int) -> str:
    return f'root ::= "{"a" * length}"\n'


def _behind_a_letter(length: int, number: int) -> str:
    strings = " ".join(f'"{"a" * length}"' for _ in range(number))
    return f'start: "x" T\nT: {strings}\n'


@attack("rule-chains", "A1")
async def send_rule_chains(target: Target, seen: Seen) -> None:
    """Send chains of thousands of rules or ``$ref``s, on which recursive compilers overflow the stack."""
    async with target.generation() as stub:
        for structured in _chains():
            request = request_of(max_tokens=4, structured=structured)
            await count(seen, stub.Generate(request, metadata=target.metadata, timeout=10))


@attack("slow-grammars", "A2")
async def send_slow_grammars(target: Target, seen: Seen) -> None:
    """Send grammars that take seconds to minutes to compile, from callers that disconnect early."""
    async with target.generation() as stub:
        requests = [request_of(max_tokens=4, structured=each) for each in _slow_to_compile()]
        calls = [
            stub.Generate(request, metadata=target.metadata, timeout=target.seconds)
            for request in requests
            for _ in range(2)
        ]
        await count_all(seen, calls)


@attack("ambiguous-grammars", "A5", may_see=TOO_COSTLY)
async def send_ambiguous_grammars(target: Target, seen: Seen) -> None:
    async with target.generation() as stub:
        requests = [_ambiguous(grammar, n=4) for grammar in AMBIGUOUS]
        calls = [stub.Generate(each, metadata=target.metadata, timeout=target.seconds) for each in requests]
        await count_all(seen, calls)


@attack("costly-masks", "masks", may_see=TOO_COSTLY)
async def send_costly_masks(target: Target, seen: Seen) -> None:
    """Send grammars that compile quickly but have slow masks: strings of thousands of characters."""
    strings = _behind_a_letter(16_000, 15), _behind_a_letter(8_000, 4)
    grammars = itertools.cycle((_literal(250_000), _literal(16_000), *strings))

    async def call(stub: Any, *_: Any) -> None:
        request = request_of(max_tokens=500, structured=pb.Structured(grammar=next(grammars)))
        await count(seen, stub.Generate(request, metadata=target.metadata, timeout=20))

    await repeat(target, 4, call)


@attack("spent-grammars", "masks", may_see=TOO_COSTLY)
async def spend_grammars(target: Target, seen: Seen) -> None:
    numbers = itertools.count()

    async def call(stub: Any, _: random.Random, left: float) -> None:
        number = next(numbers)
        request = _ambiguous(AMBIGUOUS[number % len(AMBIGUOUS)], n=5, seed=number, ignore_eos=True)
        call = stub.Generate(request, metadata=target.metadata, timeout=left)
        if number % 2:
            cancel_later(call, 1.0)
        await count(seen, call)

    await repeat(target, 12, call)
