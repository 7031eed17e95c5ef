"""Grammars that force tool calls whose arguments match the tools' schemas."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from .call_writer import CallWriter, IdStyle, Tools
from .text_source import Steps, TextSource

AddedId: TypeAlias = Callable[[str], "int | None"]
"""Function that returns the id of the added token with exactly this text; None if there is none."""

_ANY_TEXT = r"/(.|\n)*/"
_SCALARS = ("integer", "number", "boolean", "null")
_WHITESPACE = r"[ \n]?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Notation of a tool call's arguments.

    texts    text values: "raw" (unquoted), "json", or a quotation mark
    nested   lists and objects: "json", or "bare" (unquoted keys)
    """

    before: str
    after: str
    between: str = ""
    texts: str = "raw"
    nested: Literal["json", "bare"] = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    section: tuple[str, str] = ("", "")
    call: tuple[str, str]
    between: str = ""
    parameters: Parameters | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat(ABC):
    """A notation of tool calls."""

    start: str
    end: str
    shape: CallShape
    id_style: IdStyle = "call"
    is_bare: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.start, self.end, *self._inner_marks())))

    def _inner_marks(self) -> tuple[str, ...]:
        return ()

    @abstractmethod
    def read(self, source: TextSource, calls: CallWriter) -> Steps[None]: ...


def call_grammar(
    shape: CallShape,
    tools: Tools,
    *,
    start: str,
    marks: Iterable[str],
    added_id: AddedId,
    is_many: bool,
    with_text: bool = False,
    or_schema: Any = None,
) -> str:
    """Return a Lark grammar for tool calls. ``or_schema`` is the JSON schema of output without calls."""
    writer = _Writer(shape, marks, added_id)
    return writer.grammar(tools, start=start, is_many=is_many, with_text=with_text, or_schema=or_schema)


class _Writer:
    def __init__(self, shape: CallShape, marks: Iterable[str], added_id: AddedId) -> None:
        self._shape = shape
        self._ids = {mark: found for mark in set(marks) if (found := added_id(mark)) is not None}
        self._splits = re.compile(
            "|".join(map(re.escape, sorted(self._ids, key=len, reverse=True))) or r"(?!)"
        )
        self._rules: list[str] = []
        self._has_bare = False

    def grammar(self, tools: Tools, *, start: str, is_many: bool, with_text: bool, or_schema: Any) -> str:
        shape = self._shape
        if with_text and start:
            opening, before = shape.section[0].removeprefix(start), shape.call[0]
            before = before.removeprefix("" if shape.section[0] else start)
            self._shape = shape = replace(
                shape, section=(opening, shape.section[1]), call=(before, shape.call[1])
            )
        names = [self._call(index, tool["function"]) for index, tool in enumerate(tools)]
        one = f"({' | '.join(names)})"
        has_more = is_many and (shape.section[0] or not with_text)
        more = f" ({self._texts(shape.between)} {one})*" if has_more else ""
        self._rules.append(
            f"calls: {self._texts(shape.section[0])} {one}{more} {self._texts(shape.section[1])}"
        )
        if not with_text:
            starts = "start: calls"
            if or_schema is not None:
                starts += f" | {_json(or_schema)}"
        elif start:
            lead = f"lead: TEXT? {self._texts(start)}"
            if start not in self._ids:
                lead = f"lead[lazy]: TEXT {json.dumps(start)}"
            starts = f"start: (lead calls){'*' if is_many else '?'} TEXT?\n{lead}\nTEXT: {_ANY_TEXT}"
        else:
            starts = "start: calls | TEXT\nTEXT: /[^{](.|\\n)*/"
        if self._has_bare:
            self._add_bare_rules()
        return "\n".join([starts, *self._rules]) + "\n"

    def _add_bare_rules(self) -> None:
        assert self._shape.parameters is not None
        quote = self._shape.parameters.texts
        self._rules += [f"quoted: {self._texts(quote)} {self._text('quoted', quote)}", *_BARE_RULES]

    def _parts(self, text: str) -> list[str]:
        found, at = [], 0
        for match in self._splits.finditer(text):
            found += [json.dumps(text[at : match.start()])] if match.start() > at else []
            found.append(f"<[{self._ids[match.group()]}]>")
            at = match.end()
        return found + ([json.dumps(text[at:])] if at < len(text) else [])

    def _texts(self, text: str) -> str:
        return " ".join(self._parts(text))

    def _call(self, index: int, function: Mapping[str, Any]) -> str:
        before, after = self._shape.call
        head, has_index, rest = before.replace("{name}", function["name"]).partition("{index}")
        head = self._texts(head) + (f" /[0-9]+/ {self._texts(rest)}" if has_index else "")
        schema = _parameters_of(function)
        arguments = _json(schema) if self._shape.parameters is None else self._parameters(index, schema)
        self._rules.append(f"call_{index}: {head} {arguments} {self._texts(after)}")
        return f"call_{index}"

    def _parameters(self, call: int, schema: Mapping[str, Any]) -> str:
        parameters = self._shape.parameters
        assert parameters is not None
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        ordered = sorted(properties, key=lambda key: key not in required)
        parts = []
        for index, key in enumerate(ordered):
            rule = f"p_{call}_{index}"
            value = self._value(rule, parameters, properties[key], shared)
            separator = self._texts(parameters.between) if index and required else ""
            self._rules.append(
                f"{rule}: {separator} {self._texts(parameters.before.replace('{key}', key))} {value}"
            )
            parts.append(rule if key in required else f"{rule}?")
        if parameters.between and not required and len(ordered) > 1:
            return f"({' | '.join(part.rstrip('?') for part in parts)})?"
        return " ".join(parts)

    def _value(self, rule: str, parameters: Parameters, schema: Any, shared: Mapping[str, Any]) -> str:
        after = self._texts(parameters.after)
        schema = schema if isinstance(schema, Mapping) else {}
        if schema.get("type") == "string" and parameters.texts != "json":
            quote = "" if parameters.texts == "raw" else parameters.texts
            if choices := [each for each in schema.get("enum", ()) if isinstance(each, str)]:
                return f"({' | '.join(self._texts(quote + each + quote) for each in choices)}) {after}"
            return f"{self._texts(quote)} {self._text(rule, quote + parameters.after)}"
        if parameters.nested == "bare" and schema.get("type") not in _SCALARS:
            self._has_bare = True
            return f"bare_value {after}"
        return f"{_json({**shared, **schema})} {after}"

    def _text(self, rule: str, end: str) -> str:
        if not end:
            return _ANY_TEXT
        if self._splits.match(end.lstrip("\n")):
            return f"{_ANY_TEXT} {self._texts(end)}"
        self._rules.append(f"{rule}_text[suffix={json.dumps(end)}]: {_ANY_TEXT}")
        return f"{rule}_text"


_BARE_RULES = [
    'bare_value: quoted | /-?[0-9]+(\\.[0-9]+)?/ | "true" | "false" | "null" | bare_list | bare_object',
    'bare_list: "[" (bare_value ("," bare_value)*)? "]"',
    'bare_object: "{" (bare_pair ("," bare_pair)*)? "}"',
    'bare_pair: /[A-Za-z_][A-Za-z0-9_]*/ ":" bare_value',
]


def _parameters_of(function: Mapping[str, Any]) -> dict[str, Any]:
    found = function.get("parameters")
    if not isinstance(found, Mapping) or function.get("strict") is False:
        return {"type": "object"}
    return {"type": "object", **found}


def _json(schema: Any) -> str:
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}
    return f"%json {json.dumps(schema)}"
