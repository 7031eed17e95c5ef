from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from .limits import (
    MAX_DEPTH,
    MAX_GRAMMAR_BYTES,
    MAX_LITERAL_BYTES,
    MAX_PROPERTIES,
    MAX_REFERENCES,
    MAX_RULES,
    MAX_TAGS,
    MAX_VALUES,
)
from .schema_check import check_schema

# White space between JSON elements. Without a limit, some models write nothing else.
WHITESPACE = r"[ \n]?"
_RULE = re.compile(r"^\s*[?!]?[\w.\-]+(?:\[[^\]\n]*\])?(?:\.\d+)?\s*(?:::=|:)", re.MULTILINE)
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*+"|/(?:[^/\\\n]|\\.)++/')
_OPERATORS = re.compile(r"[|()\[\]{}*+?]")
_PROSE = {
    "title",
    "description",
    "$comment",
    "examples",
    "default",
}
_TAG_KEYS = {"type", "triggers", "structures"}
_STRUCTURE_KEYS = {"begin", "schema", "end"}


def grammar_of(kind: str, source: str) -> str:
    """Convert a source to an llguidance grammar. Raises ValueError for an invalid or oversized source."""
    made = _grammar_of(kind, source)
    if len(made) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"its grammar has {len(made)} bytes, but at most {MAX_GRAMMAR_BYTES} are allowed")
    return made


def _grammar_of(kind: str, source: str) -> str:
    from llguidance import LLMatcher, grammar_from

    match kind:
        case "json_schema":
            return _json_grammar(_parsed(source))
        case "json_object":
            return _json_grammar({"type": "object"})
        case "regex":
            _check_literals(_OPERATORS.split(source))
            return LLMatcher.grammar_from_regex(source)
        case "grammar":
            _check_number("rules", len(_RULE.findall(source)), MAX_RULES)
            for schema in _schemas_in(source):
                check_schema(schema)
            _check_literals(_QUOTED.findall(source))
            return grammar_from("grammar", source)
        case "choice":
            choices = json.loads(source)
            _check_literals(choices)
            alternatives = " | ".join(json.dumps(choice) for choice in choices)
            return LLMatcher.grammar_from_lark(f"start: {alternatives}")
        case "structural_tag":
            return _tag_grammar(_parsed(source))
        case _:
            raise ValueError(f"structured output has no kind {kind!r}")


def _schemas_in(grammar: str) -> Iterator[Any]:
    for place in re.finditer(r"%json\s*", grammar):
        with contextlib.suppress(ValueError):
            yield json.JSONDecoder().raw_decode(grammar, place.end())[0]


def _json_grammar(schema: Any) -> str:
    from llguidance import LLMatcher

    if schema is False:
        raise ValueError("it matches no output")
    schema = {} if schema is True else schema
    check_schema(schema)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": WHITESPACE})


def _parsed(source: str) -> Any:
    try:
        value = json.loads(source)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    _check_size(value)
    return value


def _check_size(value: object) -> None:
    num_values, references = 0, set()
    for depth, level in enumerate(_levels(value), start=1):
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        num_values += len(level)
        for item in level:
            if isinstance(item, dict):
                _check_number("keys in one object", len(item), MAX_PROPERTIES)
                references.add(str(item.get("$ref")))
                _check_literals([*item, *(each for key, each in item.items() if key not in _PROSE)])
            elif isinstance(item, list):
                _check_literals(item)
    _check_number("values", num_values, MAX_VALUES)
    _check_number("different $ref", len(references), MAX_REFERENCES)


def _levels(value: object) -> Iterator[list[object]]:
    level = [value]
    while level:
        yield level
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        level = inner


def _check_literals(values: Iterable[object]) -> None:
    longest = max((len(each.encode()) for each in values if isinstance(each, str)), default=0)
    if longest > MAX_LITERAL_BYTES:
        raise ValueError(f"it has a literal of {longest} bytes, but at most {MAX_LITERAL_BYTES} are allowed")


def _check_number(what: str, number: int, most: int) -> None:
    if number > most:
        raise ValueError(f"it has {number} {what}, but at most {most} are allowed")


def _tag_grammar(value: Any) -> str:
    from llguidance import StructTag

    if not isinstance(value, dict) or not isinstance(value.get("structures"), list):
        raise ValueError('it must be an object with "triggers" and "structures"')
    if unknown := value.keys() - _TAG_KEYS:
        raise ValueError(f"its key {sorted(unknown)[0]!r} is not known")
    triggers, structures = value.get("triggers"), value["structures"]
    if not isinstance(triggers, list) or not all(isinstance(trigger, str) for trigger in triggers):
        raise ValueError('its "triggers" must be a list of strings')
    _check_number("structures", len(structures), MAX_TAGS)
    if not structures:
        raise ValueError("it has no structures")
    return StructTag.to_grammar([_tag(each, triggers) for each in structures], assume_special=False)


def _tag(structure: Any, triggers: list[str]) -> Any:
    from llguidance import StructTag

    if not isinstance(structure, dict):
        raise ValueError(f"each of its structures must be an object, got {type(structure).__name__}")
    if unknown := structure.keys() - _STRUCTURE_KEYS:
        raise ValueError(f"the key {sorted(unknown)[0]!r} of a structure is not known")
    for name in ("begin", "end"):
        if not isinstance(structure.get(name), str):
            raise ValueError(f'"{name}" of a structure must be a string, got {structure.get(name)!r}')
    begin, schema = structure["begin"], structure.get("schema")
    trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
    if trigger is None:
        raise ValueError(f"{begin!r} must begin with one of the triggers {triggers!r}")
    if not isinstance(schema, dict):
        raise ValueError(f"the schema of {begin!r} must be an object")
    check_schema(schema)
    return StructTag(trigger=trigger, begin=begin, grammar=schema, end=structure["end"])
