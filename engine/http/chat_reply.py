"""Parsing of a chat sample's text into content, reasoning and tool calls, during generation.

``chat.py`` makes a ``ReplyReader`` for each sample, passes it the sample's deltas, and writes the result,
whole or as a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..api.outputs import Delta, FinishReason
from ..chat.answer import AnswerReader
from ..chat.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallMalformed,
    ContentText,
    ReasoningText,
)
from .chat_types import FunctionCall, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPart:
    """New parts of a reply. ``tool_calls``: pieces of calls, each with its call's index."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def is_content(self) -> bool:
        """Whether it has only content."""
        return bool(self.content) and not self.reasoning and not self.tool_calls


class ReplyReader(Protocol):
    """Parser of one sample of a chat."""

    @property
    def has_called_tools(self) -> bool:
        """Whether the output so far has tool calls, for the finish reason."""
        ...

    def read(self, delta: Delta) -> ReplyPart:
        """Return the new parts of a delta. The last delta has a finish reason and flushes all text held
        back."""
        ...


class AnswerReply:
    """Parses a sample with the parsers of the model's family."""

    def __init__(self, reader: AnswerReader, *, shows_reasoning: bool = True) -> None:
        self._reader = reader
        self._shows_reasoning = shows_reasoning
        self.has_called_tools = False

    def read(self, delta: Delta) -> ReplyPart:
        events = self._reader.add(delta.text)
        if delta.finish_reason is not None:
            events += self._reader.finish(was_cut=delta.finish_reason is FinishReason.LENGTH)
        content, reasoning = [], []
        calls: dict[int, ToolCall] = {}
        for event in events:
            match event:
                case ContentText(text):
                    content.append(text)
                case ReasoningText(text) if self._shows_reasoning:
                    reasoning.append(text)
                case CallBegin(index, call_id, name):
                    calls[index] = _piece(index, "", call_id, name)
                case CallArguments(index, text):
                    calls[index] = _longer(calls.get(index) or _piece(index, ""), text)
                case CallMalformed(text, begun):
                    content.append(text)
                    if begun is not None:  # parts already sent stay unchanged
                        calls.pop(begun, None)
                case CallEnd():
                    self.has_called_tools = True
        return ReplyPart(
            content="".join(content), reasoning="".join(reasoning), tool_calls=tuple(calls.values())
        )


def _piece(index: int, arguments: str, call_id: str | None = None, name: str | None = None) -> ToolCall:
    """Return a piece of a call; the first piece has the id and the name."""
    if call_id is None:
        function = FunctionCall.model_construct(arguments=arguments)
        return ToolCall.model_construct(index=index, function=function)
    function = FunctionCall.model_construct(name=name, arguments=arguments)
    return ToolCall.model_construct(index=index, id=call_id, type="function", function=function)


def _longer(piece: ToolCall, arguments: str) -> ToolCall:
    piece.function.arguments += arguments
    return piece
