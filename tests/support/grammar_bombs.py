from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from octavo.engine.api.structured_output import StructuredOutput


def lark_chain(length: int) -> str:
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(length))
    return f'start: r0\n{rules}r{length}: "a"\n'


def gbnf_chain(length: int) -> str:
    rules = "".join(f"r{i} ::= r{i + 1}\n" for i in range(length))
    return f'root ::= r0\n{rules}r{length} ::= "a"\n'


def schema_chain(length: int, link: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    chain = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(length)}
    return {"$defs": chain | {f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def items(target: str) -> dict[str, Any]:
    return {"type": "array", "items": {"$ref": target}}


def tag(schema: dict[str, Any]) -> dict[str, Any]:
    return {"triggers": ["<"], "structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}]}


def chains(length: int) -> dict[str, StructuredOutput]:
    """Return chains that overflowed the server's stack, in every form."""
    return {
        "lark": StructuredOutput(grammar=lark_chain(length)),
        "gbnf": StructuredOutput(grammar=gbnf_chain(length)),
        "items": StructuredOutput(json_schema=schema_chain(length, items)),
        "ref": StructuredOutput(json_schema=schema_chain(length, lambda target: {"$ref": target})),
        "allOf": StructuredOutput(
            json_schema=schema_chain(length, lambda target: {"allOf": [{"$ref": target}]})
        ),
        "anyOf": StructuredOutput(
            json_schema=schema_chain(length, lambda target: {"anyOf": [{"$ref": target}, {"type": "null"}]})
        ),
        "structural_tag": StructuredOutput(structural_tag=tag(schema_chain(length, items))),
    }


def hidden_chain(length: int) -> StructuredOutput:
    """Return a grammar with a long chain of rules inside a schema; limits on rules do not count it."""
    return StructuredOutput(grammar=f"start: x\nx: %json {json.dumps(schema_chain(length, items))}")


def literals(length: int) -> dict[str, StructuredOutput]:
    text = "a" * length
    return {
        "gbnf": StructuredOutput(grammar=f'root ::= "{text}"\n'),
        "lark pattern": StructuredOutput(grammar=f"start: /{text}/\n"),
        "regex": StructuredOutput(regex=text),
        "choice": StructuredOutput(choice=(text, "b")),
        "const": StructuredOutput(json_schema={"const": text}),
        "enum": StructuredOutput(json_schema={"enum": [text]}),
        "property": StructuredOutput(json_schema={"type": "object", "properties": {text: {}}}),
        "tag": StructuredOutput(structural_tag=tag({"const": text})),
    }


def joined_literals(length: int, count: int) -> StructuredOutput:
    return StructuredOutput(grammar="start: T\nT: " + " ".join([f'"{"a" * length}"'] * count) + "\n")


def slow(number: int = 0) -> StructuredOutput:
    """Return a regex whose compilation takes half a minute; ``number`` makes it unique."""
    return StructuredOutput(regex="(?:a*)*" * (30_000 + number))


def greedy(number: int = 0) -> StructuredOutput:
    """Return a grammar whose compilation takes hundreds of megabytes; ``number`` makes it unique."""
    patterns = "".join(f"T{i}: /.*a{i}.*b/\n" for i in range(39))
    return StructuredOutput(
        grammar=f"start: T\n{patterns}T: {' & '.join(f'T{i}' for i in range(39))}\n//{number}\n"
    )


AMBIGUOUS = StructuredOutput(grammar='start: s\ns: s s s s | "a"?\n')
