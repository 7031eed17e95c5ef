from __future__ import annotations

import re

from ..api.outputs import ChatAnswer, ToolCall
from .call_grammar import ToolFormat
from .call_writer import CallWriter, Tools
from .events import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallMalformed,
    ContentText,
    Event,
    ReasoningText,
)
from .harmony import HarmonyCalls, read_messages
from .reasoning import Reasoning
from .text_source import Malformed, Steps, TextSource, Unfinished

_MAX_CALL_STARTS, _MAX_CALLS_TEXT = 16, 8_192


class AnswerReader:
    """Parses the output of one sample into events.

    Call ``add`` with each new piece of text, and ``finish`` at the end. Arguments of tool calls are exactly
    what the model wrote, even if they are incomplete.
    """

    def __init__(
        self,
        *,
        reasoning: Reasoning | None = None,
        is_thinking: bool = False,
        tool_format: ToolFormat | None = None,
        tools: Tools = (),
        max_calls: int | None = None,
    ) -> None:
        self._source = TextSource()
        self._reasoning = reasoning
        self._is_thinking = is_thinking
        self._format = tool_format
        self._calls = CallWriter(tools, tool_format.id_style if tool_format is not None else "call")
        self._max_calls = max_calls
        self._was_cut = False
        self._steps = self._answer()

    def add(self, text: str) -> list[Event]:
        self._source.rest += text
        return self._run()

    def finish(self, *, was_cut: bool) -> list[Event]:
        """Return the remaining events."""
        self._source.is_closed, self._was_cut = True, was_cut
        return self._run()

    def _run(self) -> list[Event]:
        found: list[Event] = []
        for event in self._steps:
            if event is None:
                break
            if self._max_calls is None or self._calls.num_calls <= self._max_calls:
                found.append(event)
        return found

    def _answer(self) -> Steps[None]:
        reasoning, form = self._reasoning, self._format
        if reasoning is not None and reasoning.is_harmony and isinstance(form, HarmonyCalls | None):
            yield from read_messages(
                self._source,
                self._calls,
                is_thinking=self._is_thinking,
                has_tools=form is not None,
                was_cut=lambda: self._was_cut,
            )
            return
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        yield from self._read_content()

    def _read_reasoning(self, marks: Reasoning) -> Steps[None]:
        source = self._source
        if not self._is_thinking:
            space = yield from self._leading_space()
            openers = tuple(filter(None, (marks.start, marks.direct)))
            opener = yield from source.starts_with(*openers)
            if opener is None:
                if self._is_cut_within(openers):
                    source.take(len(source.rest))
                else:
                    source.give_back(space)
                return
            source.take(len(opener))
            if opener == marks.direct:
                return
        yield from source.skip_space()
        if marks.header and (yield from source.starts_with(marks.header)) is not None:
            source.take(len(marks.header))
            yield from source.skip_space()
        elif marks.header and self._is_cut_within((marks.header,)):
            source.take(len(source.rest))
        source.mark()
        ended = yield from source.stream_until(marks.end, wrap=ReasoningText, holds_space=True)
        if ended is not None:
            yield from source.skip_space()
            return
        if text := self._last_text((marks.end,)).rstrip():
            yield ReasoningText(text)
        if self._format is not None and not self._was_cut:
            yield from self._calls_at_end(source.taken, self._format)

    def _calls_at_end(self, thought: str, form: ToolFormat) -> list[Event]:
        thought = thought.rstrip()[-_MAX_CALLS_TEXT:]
        starts = [found.start() for found in re.finditer(re.escape(form.start), thought)]
        for start in starts[-_MAX_CALL_STARTS:] if thought.endswith(form.end) else ():
            reader = AnswerReader(tool_format=form, tools=self._calls.tools, max_calls=self._max_calls)
            events = reader.add(thought[start:]) + reader.finish(was_cut=False)
            if all(isinstance(event, CallBegin | CallArguments | CallEnd) for event in events):
                return events
        return []

    def _leading_space(self) -> Steps[str]:
        self._source.mark()
        yield from self._source.skip_space()
        return self._source.taken

    def _read_content(self) -> Steps[None]:
        source, form = self._source, self._format
        if form is None:
            while source.rest or (yield from source.more()):
                yield ContentText(source.take(len(source.rest)))
            return
        has_calls = False
        if form.is_bare:
            space = yield from self._leading_space()
            if source.rest.startswith("{"):
                source.mark()
                yield from self._read_calls(form)
                has_calls = self._calls.num_calls > 0
            else:
                source.give_back(space)
        while mark := (yield from source.stream_until(form.start, wrap=ContentText, holds_space=True)):
            source.mark(mark)
            yield from self._read_calls(form)
            has_calls = True
        text = self._last_text((form.start,))
        if text and not (has_calls and text.isspace()):
            yield ContentText(text)

    def _read_calls(self, form: ToolFormat) -> Steps[None]:
        source, calls = self._source, self._calls
        try:
            yield from form.read(source, calls)
            return
        except Malformed:
            if form.end:
                while (at := source.rest.find(form.end)) < 0 and (yield from source.more()):
                    pass
                source.take(len(source.rest) if at < 0 else at + len(form.end))
        except Unfinished:
            source.take(len(source.rest))
            if self._was_cut:
                return
        yield CallMalformed(source.taken, calls.open_index)
        calls.give_up()

    def _last_text(self, marks: tuple[str, ...]) -> str:
        is_torn = self._is_cut_within(marks)
        rest = self._source.take(len(self._source.rest))
        return "" if is_torn else rest

    def _is_cut_within(self, marks: tuple[str, ...]) -> bool:
        rest = self._source.rest.strip()
        return self._was_cut and any(mark.startswith(rest) for mark in marks)


def whole_answer(reader: AnswerReader, text: str, *, was_cut: bool) -> ChatAnswer:
    """Parse complete output. Malformed tool calls stay in the content."""
    found = ChatAnswer()
    for event in [*reader.add(text), *reader.finish(was_cut=was_cut)]:
        match event:
            case ContentText(more):
                found.content += more
            case ReasoningText(more):
                found.reasoning += more
            case CallBegin(_, call_id, name):
                found.tool_calls.append(ToolCall(call_id=call_id, name=name))
            case CallArguments(_, more):
                found.tool_calls[-1].arguments += more
            case CallEnd():
                found.tool_calls[-1].is_complete = True
            case CallMalformed(more, index):
                found.content += more
                if index is not None:
                    found.tool_calls.pop()
    return found
