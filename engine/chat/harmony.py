"""Output of gpt-oss in OpenAI's Harmony format: messages with a channel and a recipient."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .call_grammar import AddedId, CallShape, ToolFormat, call_grammar
from .call_writer import CallWriter, Tools
from .events import CallMalformed, ContentText, ReasoningText
from .text_source import Malformed, Steps, TextSource, Unfinished

_START, _CHANNEL, _BODY, _END, _CALL, _KIND = (
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>",
)  # fmt: skip
_OPENERS = (_START, _CHANNEL, "to=")
_ENDS = (_END, _CALL, "<|return|>", _START)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_SHAPE = CallShape(call=(f"{_CHANNEL}commentary to=functions.{{name}} {_KIND}json{_BODY}", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyCalls(ToolFormat):
    start: str = f"{_CHANNEL}commentary to="
    end: str = ""
    shape: CallShape = _SHAPE

    @property
    def marks(self) -> tuple[str, ...]:
        return (_START, _CHANNEL, _BODY, _END, _KIND)

    def read(self, source: TextSource, calls: CallWriter) -> Steps[None]:
        head, _ = yield from source.read_until(_BODY)
        recipient = head.split(_KIND)[0].split()[:1]
        if not recipient:
            raise Malformed
        yield from _read_call(source, calls, recipient[0])

    def whole_grammar(
        self, tools: Tools, *, added_id: AddedId, is_forced: bool, or_schema: Any
    ) -> str | None:
        """Return a grammar for output with a tool call; None if the vocabulary lacks the marks."""
        ids = {mark: added_id(mark) for mark in self.marks}
        if None in ids.values():
            return None
        calls = call_grammar(
            self.shape, tools, start=self.start, marks=self.marks, added_id=added_id, is_many=False
        )
        token = {mark: f"<[{found}]>" for mark, found in ids.items()}
        again = f'{token[_END]} {token[_START]} "assistant"'
        answer = f"%json {json.dumps(or_schema)}" if or_schema is not None else "TEXT"
        final = "" if is_forced else f' | {token[_CHANNEL]} "final" {token[_BODY]} {answer}'
        rules = (
            f"start: (aside {again})* (calls{final})",
            f'aside: {token[_CHANNEL]} ("analysis" | "commentary") {token[_BODY]} TEXT',
            r"TEXT: /(.|\n)*/",
        )
        return "\n".join(rules) + "\n" + calls.removeprefix("start: calls\n")


def read_messages(
    source: TextSource,
    calls: CallWriter,
    *,
    is_thinking: bool,
    has_tools: bool,
    was_cut: Callable[[], bool],
) -> Steps[None]:
    """Read messages: analysis is reasoning, and messages to functions are tool calls."""
    has_content = False
    head = f"{_CHANNEL}analysis" if is_thinking else None
    while True:
        if head is None:
            head = yield from _read_head(source, was_cut, is_first=not has_content)
            if head is None:
                return
        name = _RECIPIENT.search(head)
        source.mark(head + _BODY)
        if name is not None and has_tools:
            yield from _read_or_give_up(source, calls, name.group(1), was_cut)
        elif _CHANNEL + "analysis" in head and name is None:
            yield from source.skip_space()
            yield from _read_text(source, was_cut, ReasoningText, holds_space=True)
        else:
            if has_content:
                yield ContentText("\n\n")
            has_content = True
            yield from _read_text(source, was_cut, ContentText, holds_space=False)
        head = None


def _read_head(source: TextSource, was_cut: Callable[[], bool], *, is_first: bool) -> Steps[str | None]:
    source.mark()
    yield from source.skip_space()
    space = source.taken
    opener = yield from source.starts_with(*_OPENERS)
    if opener is None and source.rest and is_first:
        if not (was_cut() and any(each.startswith(source.rest) for each in _OPENERS)):
            source.give_back(space)
            while source.rest or (yield from source.more()):
                yield ContentText(source.take(len(source.rest)))
        return None
    try:
        head, _ = yield from source.read_until(_BODY)
    except Unfinished:
        rest = source.take(len(source.rest))
        if rest.strip() and not was_cut():
            yield CallMalformed(rest, None)
        return None
    return head


def _read_text(
    source: TextSource, was_cut: Callable[[], bool], wrap: Any, *, holds_space: bool
) -> Steps[None]:
    ended = yield from source.stream_until(*_ENDS, wrap=wrap, holds_space=holds_space)
    if ended == _START:
        source.give_back(_START)
    elif ended is None:
        rest = source.take(len(source.rest))
        if rest.strip() and not (was_cut() and any(mark.startswith(rest.strip()) for mark in _ENDS)):
            yield wrap(rest.rstrip() if holds_space else rest)


def _read_or_give_up(
    source: TextSource, calls: CallWriter, name: str, was_cut: Callable[[], bool]
) -> Steps[None]:
    try:
        yield from _read_call(source, calls, name)
        return
    except Malformed:
        while not any(mark in source.rest for mark in _ENDS) and (yield from source.more()):
            pass
        ends = [at for mark in _ENDS if (at := source.rest.find(mark)) >= 0]
        source.take(min(ends, default=len(source.rest)))
    except Unfinished:
        source.take(len(source.rest))
        if was_cut():
            return
    yield CallMalformed(source.taken, calls.open_index)
    calls.give_up()


def _read_call(source: TextSource, calls: CallWriter, name: str) -> Steps[None]:
    yield calls.begin(name.removeprefix("functions."))
    yield from source.json_value(calls.arguments)
    yield calls.end()
    yield from source.skip_space()
    if (ended := (yield from source.starts_with(*_ENDS))) is not None and ended != _START:
        source.take(len(ended))
