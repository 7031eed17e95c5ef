from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import InvalidRequest

MAX_SOURCE = 256 * 1024  # characters of a schema, pattern, grammar or list of choices
MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """Constraint on the output. Exactly one field must be set; the names are vLLM's.

    json_schema      JSON that validates against this schema (a mapping or JSON text)
    json_object      any JSON object
    regex            full match of this pattern, without look-around or back-references
    grammar          context-free grammar in GBNF ("root ::= ...") or Lark ("start: ...")
    choice           exactly one of these strings
    structural_tag   free text with tags, for example
                     {"type": "structural_tag", "triggers": ["<f="], "structures": [{"begin": "<f=a>",
                     "schema": {...}, "end": "</f>"}]}
    """

    json_schema: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] = ()
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, (), False)]
        if self.json_schema is False:
            given.append("json_schema")
        if len(given) != 1:
            raise InvalidRequest(
                f"structured must have exactly one of {', '.join(f.name for f in fields(self))}, "
                f"got {' and '.join(given) or 'none'}; give one"
            )
        if isinstance(self.choice, str):
            raise InvalidRequest(
                f"choice must be a tuple of strings, got {self.choice!r}; write ({self.choice!r},)"
            )
        for name in ("json_schema", "structural_tag"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                object.__setattr__(self, name, _as_json(name, value))
        if self.choice:
            object.__setattr__(self, "choice", tuple(self.choice))
            _check_choices(self.choice)
        elif len(self.source) > MAX_SOURCE:
            raise InvalidRequest(
                f"{given[0]} must have at most {MAX_SOURCE} characters, got {len(self.source)}; shorten it"
            )

    @property
    def kind(self) -> str:
        if self.choice:
            return "choice"
        if self.json_object:
            return "json_object"
        names = ("json_schema", "regex", "grammar", "structural_tag")
        return next(name for name in names if getattr(self, name) is not None)

    @property
    def source(self) -> str:
        if self.json_object:
            return ""
        return json.dumps(self.choice) if self.choice else str(getattr(self, self.kind))


def _as_json(name: str, value: object) -> str:
    try:
        return json.dumps(dict(value) if isinstance(value, Mapping) else value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}") from error


def _check_choices(choices: tuple[str, ...]) -> None:
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"choice must have at most {MAX_CHOICES} strings, got {len(choices)}; drop some")
    for choice in choices:
        if not isinstance(choice, str):
            raise InvalidRequest(f"choice must hold strings, got {choice!r}")
        if not choice:
            raise InvalidRequest(
                "choice must not contain the empty string, because an output has at "
                "least one token; remove it"
            )
    length = sum(map(len, choices))
    if length > MAX_SOURCE:
        raise InvalidRequest(
            f"the strings of choice must have at most {MAX_SOURCE} characters in total, "
            f"got {length}; shorten them"
        )
