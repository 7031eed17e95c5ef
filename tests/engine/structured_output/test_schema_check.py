from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from octavo.engine.structured_output.grammar import grammar_of

ONE = {"enum": [1]}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}
MAYBE = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}


def refusal(schema: Any) -> str:
    try:
        grammar = grammar_of("json_schema", json.dumps(schema))
    except ValueError as error:
        return str(error)
    return str(LLMatcher.validate_grammar(grammar))


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("not", {"type": "integer", "not": {"const": 3}}),
        ("if", {"if": {"type": "string"}, "then": {"maxLength": 1}}),
        ("then", {"type": "integer", "then": ONE}),
        ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}),
        ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
        ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}),
        ("uniqueItems", {"type": "array", "items": ONE, "uniqueItems": True}),
        ("contains", {"type": "array", "contains": ONE}),
        ("minContains", {"type": "array", "minContains": 1}),
        ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 1}}),
        ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
        ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
        ("oneOf", {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]}),
        ("$dynamicRef", {"$dynamicRef": "#x", "$defs": {"n": {"$dynamicAnchor": "x"}}}),
        ("format", {"type": "string", "format": "unheard-of"}),
        ("patternProperties", {"properties": {"ab": ONE}, "patternProperties": {"^a": ONE}}),
        ("patternProperties", {"required": ["ab"], "patternProperties": {"b$": ONE}}),
        ("patternProperties", {"allOf": [{"properties": {"ab": ONE}}, {"patternProperties": {"^a": ONE}}]}),
        ("patternProperties", {"patternProperties": {"(?<n": ONE}}),
        ("patternProperties", {"patternProperties": {"^a": ONE}, "minProperties": 2}),
        ("minProperties", {"type": "object", "minProperties": 2}),
        ("minProperties", {"properties": {"a": ONE}, "required": ["a"], "minProperties": 3}),
        ("$ref '#'", {"$ref": "#"}),
        ("$ref '#/$defs/n'", {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}),
        ("$ref '#/$defs/n'", {"$ref": "#/$defs/n", "$defs": {"n": NODE | {"required": ["next"]}}}),
        ("$ref '#'", {"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
        ("$ref '#'", {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}),
    ],
)
def test_unsupported_keywords_are_refused_by_name(keyword: str, schema: dict[str, Any]) -> None:
    assert keyword in refusal({"type": "object"} | schema if keyword == "patternProperties" else schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": ONE}, "patternProperties": {"^b": ONE}},
        {"type": "object", "patternProperties": {"^a": ONE}, "minProperties": 1},
        {"type": "object", "properties": {"a": ONE}, "required": ["a"], "minProperties": 2},
        {"type": "object", "properties": {"patternProperties": {"enum": ["type"]}, "type": ONE}},
        {"const": {"$ref": "#", "minProperties": 9}},
        {"$ref": "#/$defs/n", "$defs": {"n": NODE}},
        {"$ref": "#/$defs/n", "$defs": {"n": NODE | {"properties": {"next": MAYBE}, "required": ["next"]}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "properties": {"$ref": {"type": "string"}}},
    ],
)
def test_supported_schemas_are_accepted(schema: dict[str, Any]) -> None:
    assert refusal(schema) == ""


def test_schemas_within_grammars_and_tags_are_checked_too() -> None:
    cycle = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
    with pytest.raises(ValueError, match="refers to itself"):
        grammar_of("grammar", f"start: %json {json.dumps(cycle)}")
    tag = {"begin": "<f>", "schema": cycle, "end": "</f>"}
    with pytest.raises(ValueError, match="refers to itself"):
        grammar_of("structural_tag", json.dumps({"triggers": ["<f"], "structures": [tag]}))
