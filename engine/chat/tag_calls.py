"""Tool calls with tags per parameter (Qwen3-Coder, GLM, MiniMax), and Gemma's notation."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..api.json_reference import resolved
from .call_grammar import ToolFormat
from .call_writer import CallWriter, Tools, as_json
from .json_calls import end_mark, read_each
from .text_source import Malformed, Steps, TextSource, Unfinished, Wrap

Parse: TypeAlias = Callable[[str, Tools], Any]
"""Parser of mlx-lm: from the text of complete calls to {"name", "arguments"}, or a list of such objects."""

_CDATA = "<![CDATA["
_MAX_REFERENCES = 16
_KINDS: Mapping[type, tuple[str, ...]] = {
    type(None): ("null",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number", "integer"),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
}


def parsed_calls(parse: Parse, text: str, tools: Tools) -> list[Mapping[str, Any]]:
    try:
        found = parse(text, tools)
    except Exception:  # parsers may raise any error
        raise Malformed from None
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(
        isinstance(call, Mapping) and {"name", "arguments"} <= call.keys() for call in calls
    ):
        raise Malformed
    return calls


@dataclass(frozen=True, slots=True, kw_only=True)
class TagCalls(ToolFormat):
    """Tool calls with a pair of tags around each name and value."""

    parse: Parse
    call: tuple[str, str] | None
    key: tuple[str, str]
    value: tuple[str, str]
    call_end: str
    trim: Literal["line", "space"]
    null_word: bool

    def _inner_marks(self) -> tuple[str, ...]:
        return (*(self.call or ()), *self.key, *self.value, self.call_end)

    @property
    def is_wrapped(self) -> bool:
        return self.call is not None and self.call[0] != self.start

    def read(self, source: TextSource, calls: CallWriter) -> Steps[None]:
        if self.call is None or not self.is_wrapped:
            yield from self._one(source, calls, "" if self.call is None else self.start)
            return
        opened = self.call[0]
        yield from read_each(source, opened, self.end, lambda: self._one(source, calls, opened))

    def _one(self, source: TextSource, calls: CallWriter, opened: str) -> Steps[None]:
        begun = len(source.taken) - len(opened)
        if self.call is not None:
            name = (yield from source.read_until(self.call[1]))[0].strip().strip("\"'")
        else:
            name, mark = yield from source.read_until(self.key[0], self.end)
            name = name.strip()
            if mark == self.end:
                yield from self._without_parameters(calls, name)
                return
            source.give_back(mark)
        yield calls.begin(name)
        written = 0
        while True:
            if (yield from source.expect(self.key[0], self.call_end)) == self.call_end:
                break
            yield calls.arguments(", " if written else "{")
            yield from self._parameter(source, calls, name, begun)
            written += 1
        yield calls.arguments("}" if written else "{}")
        [parsed] = parsed_calls(self.parse, source.taken[begun:].removesuffix(self._outer_end), calls.tools)
        if parsed["name"] != name or len(parsed["arguments"]) != written:
            raise Malformed
        yield calls.end()

    def _without_parameters(self, calls: CallWriter, text: str) -> Steps[None]:
        if text in calls.tool_names:
            yield from calls.whole(text, {})
            return
        for call in parsed_calls(self.parse, text, calls.tools):
            if "raw" in call["arguments"]:
                raise Malformed
            yield from calls.whole(str(call["name"]), call["arguments"])

    @property
    def _outer_end(self) -> str:
        return self.call_end if self.call_end == self.end and self.call is None else ""

    def _parameter(self, source: TextSource, calls: CallWriter, name: str, begun: int) -> Steps[None]:
        key = (yield from source.read_until(self.key[1]))[0].strip().strip("\"'")
        if self.value[0]:
            yield from source.expect(self.value[0])
        yield calls.arguments(f"{as_json(key)}: ")
        whole = calls.parameters(name)
        properties = whole.get("properties")
        schema = _without_references(properties.get(key), whole) if isinstance(properties, Mapping) else None
        text = _TextValue(self) if _is_text(schema) else None
        end, written, pieces = self.value[1], "", list[str]()
        while (at := source.rest.find(end)) < 0:
            piece = source.take(source.certain_length((end,)))
            pieces.append(piece)
            if text is not None and (shown := text.add(piece)):
                written += shown
                yield calls.arguments(shown)
            yield from source.require_more()
        pieces.append(source.take(at))
        source.take(len(end))
        close = "" if self._outer_end else self.call_end
        [parsed] = parsed_calls(self.parse, source.taken[begun:] + close, calls.tools)
        if key not in parsed["arguments"]:
            raise Malformed
        value = parsed["arguments"][key]
        if isinstance(schema, Mapping) and not isinstance(schema.get("type"), str):
            value = _allowed_value("".join(pieces).strip(), value, schema, whole)
        text_of_value = as_json(value)
        if not text_of_value.startswith(written):
            raise Malformed
        yield calls.arguments(text_of_value[len(written) :])


class _TextValue:
    def __init__(self, calls: TagCalls) -> None:
        self._trim = calls.trim
        self._null_word = calls.null_word
        self._held = ""
        self._has_begun = False

    def add(self, piece: str) -> str:
        held = self._held + piece
        if not self._has_begun:
            start = held.lstrip() if self._trim == "space" else held.removeprefix("\n")
            waits = not start.strip() or _CDATA.startswith(start[: len(_CDATA)])
            if waits or (self._null_word and "null".startswith(start.strip().lower())):
                self._held = held
                return ""
            held = start
        sure = len(held.rstrip() if self._trim == "space" else held.removesuffix("\n"))
        if not sure:
            self._held = held
            return ""
        shown, self._held = held[:sure], held[sure:]
        opened, self._has_begun = "" if self._has_begun else '"', True
        return opened + as_json(shown)[1:-1]


def _is_text(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string" and "enum" not in schema


def _without_references(schema: Any, whole: Mapping[str, Any]) -> Any:
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
            return schema
        schema = resolved(whole, reference) or {}
    return {}


def _allowed_value(text: str, parsed: Any, schema: Any, whole: Mapping[str, Any]) -> Any:
    for parse in (json.loads, lambda _: parsed):
        with contextlib.suppress(ValueError, RecursionError, Malformed):
            value = parse(text)
            as_json(value)
            if _allows(schema, value, whole):
                return value
    return text


def _allows(schema: Any, value: Any, whole: Mapping[str, Any]) -> bool:
    schema = _without_references(schema, whole)
    if not isinstance(schema, Mapping):
        return True
    every = schema.get("allOf")
    if isinstance(every, list) and not all(_allows(each, value, whole) for each in every):
        return False
    for options in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(options, list):
            return any(_allows(option, value, whole) for option in options)
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list):
        return as_json(value) in map(as_json, choices)
    kinds = schema.get("type")
    return not isinstance(kinds, str | list) or any(kind in kinds for kind in _KINDS.get(type(value), ()))


_WORD = re.compile(r"[^\s{}\[\],:<]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaCalls(ToolFormat):
    """Tool calls in Gemma's notation: ``call:NAME{key:<|"|>text<|"|>,number:1}``."""

    parse: Parse
    quote: str

    def _inner_marks(self) -> tuple[str, ...]:
        return (self.quote,)

    def read(self, source: TextSource, calls: CallWriter) -> Steps[None]:
        while True:
            yield from source.skip_space()
            begun = len(source.taken)
            yield from source.expect("call:")
            name = (yield from source.read_until("{"))[0].strip()
            yield calls.begin(name)
            yield calls.arguments("{")
            yield from self._rest_of_object(source, calls)
            [parsed] = parsed_calls(self.parse, source.taken[begun:], calls.tools)
            if parsed["name"] != name or as_json(parsed["arguments"]) != as_json(calls.loaded()):
                raise Malformed
            yield calls.end()
            yield from source.skip_space()
            if (yield from source.starts_with("call:")) is None:
                break
        yield from end_mark(source, self.end)

    def _rest_of_object(self, source: TextSource, calls: CallWriter) -> Steps[None]:
        depth = 1
        while depth:
            if not source.rest:
                yield from source.require_more()
            elif (yield from source.comes(self.quote)):
                yield calls.arguments('"')
                if (yield from source.stream_until(self.quote, wrap=_escaping(calls))) is None:
                    raise Unfinished
                yield calls.arguments('"')
            elif (character := source.rest[0]) in "{}[],:" or character.isspace():
                depth += (character in "{[") - (character in "}]")
                yield calls.arguments(source.take(1))
            else:
                yield calls.arguments((yield from _word(source)))


def _escaping(calls: CallWriter) -> Wrap:
    return lambda text: calls.arguments(as_json(text)[1:-1])


def _word(source: TextSource) -> Steps[str]:
    while (found := _WORD.match(source.rest)) is None or found.end() == len(source.rest):
        if found is None:
            raise Malformed
        yield from source.require_more()
    word = source.take(found.end())
    return as_json(word) if source.rest[0] == ":" else word


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeCalls(ToolFormat):
    """Tool calls that mlx-lm parses once they are complete: LFM2, FunctionGemma, Kimi K3."""

    parse: Parse
    inner_marks: tuple[str, ...] = ()

    def _inner_marks(self) -> tuple[str, ...]:
        return self.inner_marks

    def read(self, source: TextSource, calls: CallWriter) -> Steps[None]:
        text, _ = yield from source.read_until(self.end)
        for call in parsed_calls(self.parse, text, calls.tools):
            yield from calls.whole(str(call["name"]), call["arguments"], call.get("id"))
