"""Tool calls in JSON: {"name": ..., "arguments": ...}, or a name followed by JSON arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from .call_grammar import ToolFormat
from .call_writer import CallWriter
from .text_source import Malformed, Steps, TextSource

_NAME_KEYS = frozenset({"name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


def read_call_object(source: TextSource, calls: CallWriter) -> Steps[None]:
    """Read an object with a name and arguments, in either order. Raises Malformed or Unfinished."""
    yield from source.expect("{")
    name, call_id, early, is_done = "", None, None, False
    while True:
        yield from source.skip_space()
        if (yield from source.comes("}")):
            break
        key = _loaded((yield from source.json_value()))
        yield from source.expect(":")
        if key in _ARGUMENT_KEYS and name:
            yield calls.begin(name, call_id)
            yield from read_arguments(source, calls)
            is_done = True
        else:
            value = yield from source.json_value()
            if key in _NAME_KEYS:
                name = str(_loaded(value))
            elif key == "id":
                call_id = str(_loaded(value))
            elif key in _ARGUMENT_KEYS:
                early = value
        if (yield from source.expect(",", "}")) == "}":
            break
    if not is_done:
        yield calls.begin(name, call_id)
        yield calls.arguments("{}" if early is None else _unpacked(early))
    yield calls.end()


def read_arguments(source: TextSource, calls: CallWriter) -> Steps[None]:
    yield from source.skip_space()
    if (yield from source.starts_with('"')) is None:
        yield from source.json_value(calls.arguments)
        return
    yield calls.arguments(_unpacked((yield from source.json_value())))


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        raise Malformed from None


def _unpacked(value: str) -> str:
    loaded = _loaded(value)
    return loaded if isinstance(loaded, str) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls(ToolFormat):
    """JSON tool calls, as in Hermes, Qwen, Granite and Llama 3."""

    between: str = ""

    def read(self, source: TextSource, calls: CallWriter) -> Steps[None]:
        yield from source.skip_space()
        is_list = yield from source.comes("[")
        while True:
            if self.is_bare:
                yield from _check_bare(source, calls)
            yield from read_call_object(source, calls)
            yield from source.skip_space()
            following = yield from source.starts_with(*filter(None, (",", self.between)))
            if following is None or not (is_list or following == self.between):
                break
            source.take(len(following))
            source.mark()
        if is_list:
            yield from source.expect("]")
        if self.end:
            yield from end_mark(source, self.end)


def _check_bare(source: TextSource, calls: CallWriter) -> Steps[None]:
    known = tuple(
        f'{{{kind}"name":"{name}"' for name in calls.tool_names for kind in ("", '"type":"function",')
    )
    while True:
        begun = "".join(source.rest.split())
        if any(begun.startswith(each) for each in known):
            return
        if not any(each.startswith(begun) for each in known):
            raise Malformed
        yield from source.require_more()


def end_mark(source: TextSource, end: str) -> Steps[None]:
    yield from source.skip_space()
    if source.rest or not source.is_closed:
        found = yield from source.starts_with(end)
        if found is not None:
            source.take(len(found))
        elif not (source.is_closed and end.startswith(source.rest)):
            raise Malformed
        else:
            source.take(len(source.rest))


def read_each(source: TextSource, start: str, end: str, read: Callable[[], Steps[None]]) -> Steps[None]:
    is_first = True
    while True:
        yield from source.skip_space()
        if not is_first:
            source.mark()
            if source.is_closed and not source.rest:
                return
        if (yield from source.expect(start, end)) == end:
            if is_first:
                raise Malformed
            return
        yield from read()
        is_first = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadedCalls(ToolFormat):
    """Tool calls with a name and JSON arguments, as in DeepSeek, Kimi K2 and Mistral."""

    call_start: str
    call_end: str
    separators: tuple[str, ...]
    name_of: Callable[[str], tuple[str, str | None]]
    fence: tuple[str, str] | None = None
    takes_list: bool = False

    def _inner_marks(self) -> tuple[str, ...]:
        return (self.call_start, self.call_end, *self.separators)

    def read(self, source: TextSource, calls: CallWriter) -> Steps[None]:
        yield from source.skip_space()
        if self.takes_list and (yield from source.comes("[")):
            source.give_back("[")
            yield from JsonCalls(start=self.start, end="", shape=self.shape).read(source, calls)
            return
        if not self.call_start:
            yield from self._one(source, calls)
            return
        yield from read_each(source, self.call_start, self.end, lambda: self._one(source, calls))

    def _one(self, source: TextSource, calls: CallWriter) -> Steps[None]:
        head, _ = yield from source.read_until(*self.separators)
        name, call_id = self.name_of(head)
        if not name:
            name = (yield from source.read_until("\n"))[0].strip()
        yield calls.begin(name, call_id)
        yield from source.skip_space()
        is_fenced = self.fence is not None and (yield from source.comes(self.fence[0]))
        yield from read_arguments(source, calls)
        if self.fence is not None and is_fenced:
            yield from end_mark(source, self.fence[1])
        if self.call_end:
            yield from end_mark(source, self.call_end)
        yield calls.end()
