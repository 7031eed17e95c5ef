"""Schemas and grammars that are meant to hurt whoever compiles them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from octavo.engine.api.structured_output import Structured


def lark_chain(length: int) -> str:
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(length))
    return f'start: r0\n{rules}r{length}: "a"\n'


def gbnf_chain(length: int) -> str:
    rules = "".join(f"r{i} ::= r{i + 1}\n" for i in range(length))
    return f'root ::= r0\n{rules}r{length} ::= "a"\n'


def schema_chain(length: int, link: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """$defs of which each refers to the next as ``link`` says."""
    chain = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(length)}
    return {"$defs": chain | {f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def items(target: str) -> dict[str, Any]:
    return {"type": "array", "items": {"$ref": target}}


def tag(schema: dict[str, Any]) -> dict[str, Any]:
    return {"triggers": ["<"], "structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}]}


def chains(length: int) -> dict[str, Structured]:
    """Every form of a chain that overflowed the server's stack."""
    return {
        "lark": Structured(grammar=lark_chain(length)),
        "gbnf": Structured(grammar=gbnf_chain(length)),
        "items": Structured(json_schema=schema_chain(length, items)),
        "ref": Structured(json_schema=schema_chain(length, lambda target: {"$ref": target})),
        "allOf": Structured(json_schema=schema_chain(length, lambda target: {"allOf": [{"$ref": target}]})),
        "anyOf": Structured(
            json_schema=schema_chain(length, lambda target: {"anyOf": [{"$ref": target}, {"type": "null"}]})
        ),
        "structural_tag": Structured(structural_tag=tag(schema_chain(length, items))),
    }


def hidden_chain(length: int) -> Structured:
    """A chain that no count of rules or keys sees: a schema inside of a grammar."""
    return Structured(grammar=f"start: x\nx: %json {json.dumps(schema_chain(length, items))}")


def slow(number: int = 0) -> Structured:
    """One that takes half a minute to compile, given memory; another one for each number."""
    return Structured(regex="(?:a*)*" * (30_000 + number))


def greedy(number: int = 0) -> Structured:
    """One that takes hundreds of megabytes, another one for each number."""
    patterns = "".join(f"T{i}: /.*a{i}.*b/\n" for i in range(39))
    return Structured(
        grammar=f"start: T\n{patterns}T: {' & '.join(f'T{i}' for i in range(39))}\n//{number}\n"
    )


AMBIGUOUS = Structured(grammar='start: s\ns: s s s s | "a"?\n')
