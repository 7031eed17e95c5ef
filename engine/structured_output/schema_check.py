"""Checks of JSON schemas for rules that llguidance ignores."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ..api.json_reference import resolved

_ALL_OF, _ANY_OF = "allOf", ("anyOf", "oneOf")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum", "default", "examples")
_COMBINING = (_ALL_OF, *_ANY_OF, "$ref")


def check_schema(schema: Any) -> None:
    """Raise ValueError for a schema with invalid or infinite outputs."""
    schemas = list(_schemas(schema))
    combined = any(_ALL_OF in value for value in schemas)
    everywhere = {name for value in schemas for name in _names(value)}
    for value in schemas:
        _check_patterns(value, everywhere if combined or any(key in value for key in _COMBINING) else set())
        _check_number_of_names(value)
    if (endless := _endless_reference(schema, schemas)) is not None:
        raise ValueError(
            f"$ref {endless!r} refers to itself without an alternative, so no output could "
            "end; add an alternative"
        )


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    todo = [schema]
    while todo:
        item = todo.pop()
        if isinstance(item, list):
            todo.extend(item)
        elif isinstance(item, dict):
            yield item
            for keyword, value in item.items():
                if keyword in _BY_NAME and isinstance(value, dict):
                    todo.extend(value.values())
                elif keyword not in _DATA:
                    todo.append(value)


def _names(schema: dict[str, Any]) -> set[str]:
    properties, required = schema.get("properties"), schema.get("required")
    names = set(properties) if isinstance(properties, dict) else set()
    return (
        names | {name for name in required if isinstance(name, str)} if isinstance(required, list) else names
    )


def _check_patterns(schema: dict[str, Any], names: set[str]) -> None:
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict):
        return
    for pattern in patterns:
        try:
            found = re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"patternProperties {pattern!r} cannot be compared with names: {error}"
            ) from None
        if both := sorted(name for name in names | _names(schema) if found.search(name)):
            raise ValueError(
                f"patternProperties {pattern!r} matches the property {both[0]!r} too; "
                "put the pattern's schema into the property, and exclude the property from the pattern"
            )


def _check_number_of_names(schema: dict[str, Any]) -> None:
    least = schema.get("minProperties")
    if not isinstance(least, int | float) or ("properties" not in schema and least <= 1):
        return
    by_pattern = bool(schema.get("patternProperties"))
    if not by_pattern and schema.get("additionalProperties") is False:
        return
    required = schema.get("required")
    certain = len(set(map(str, required))) if isinstance(required, list) else 0
    if least > certain + 1:
        keyword = "patternProperties" if by_pattern else "additionalProperties"
        raise ValueError(
            f"minProperties {least:g} cannot be guaranteed, because {keyword} may generate a name twice; "
            f"list the names in properties, or set minProperties to at most {certain + 1}"
        )


def _endless_reference(schema: Any, schemas: list[dict[str, Any]]) -> str | None:
    references = {ref for value in schemas if isinstance(ref := value.get("$ref"), str)}
    targets = {ref: target for ref in references if (target := resolved(schema, ref)) is not None}
    ending: set[str] = references - targets.keys()
    while more := {ref for ref in targets.keys() - ending if _ends(targets[ref], ending)}:
        ending |= more
    if _ends(schema, ending):
        return None
    return min(references - ending)


def _ends(schema: Any, ending: set[str]) -> bool:
    if not isinstance(schema, dict):
        return True
    if isinstance(ref := schema.get("$ref"), str) and ref not in ending:
        return False
    if not all(_ends(one, ending) for one in _listed(schema, _ALL_OF)):
        return False
    for keyword in _ANY_OF:
        choices = _listed(schema, keyword)
        if choices and not any(_ends(one, ending) for one in choices):
            return False
    kind = schema.get("type")
    if kind is not None and kind not in ("object", "array"):
        return True
    return _contents_end(schema, ending)


def _contents_end(schema: dict[str, Any], ending: set[str]) -> bool:
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type") != "array":
        known = properties if isinstance(properties, dict) else {}
        needed = required if isinstance(required, list) else []
        return all(_ends(known[name], ending) for name in needed if name in known)
    least = schema.get("minItems")
    if isinstance(least, int | float) and least > 0:
        first = _listed(schema, "prefixItems")[: int(least)]
        rest = [schema.get("items")] if len(first) < least else []
        return all(_ends(one, ending) for one in [*first, *rest])
    return True


def _listed(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
