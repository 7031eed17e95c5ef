"""What the text of one sample of a chat means: content, reasoning and tool calls, as they come.

``ReplyReader`` is the place of parsers: ``chat.py`` makes one for each sample, hands it the sample's deltas,
and writes what it returns, be the answer whole or a stream.
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
    """What is new of a reply. ``tool_calls``: pieces of calls, each with its call's index."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def is_content(self) -> bool:
        """Whether it is content and nothing else."""
        return bool(self.content) and not self.reasoning and not self.tool_calls


class ReplyReader(Protocol):
    """Reads one sample of a chat."""

    @property
    def has_called_tools(self) -> bool:
        """Whether the output so far has calls of tools, for the finish reason."""
        ...

    def read(self, delta: Delta) -> ReplyPart:
        """What the delta adds; the sample's last delta has a finish reason, and nothing is held back then."""
        ...


class AnswerReply:
    """Reads a sample with the parsers of the model's family."""

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
                    if begun is not None:  # what of it is out already stays what it is
                        calls.pop(begun, None)
                case CallEnd():
                    self.has_called_tools = True
        return ReplyPart(
            content="".join(content), reasoning="".join(reasoning), tool_calls=tuple(calls.values())
        )


def _piece(index: int, arguments: str, call_id: str | None = None, name: str | None = None) -> ToolCall:
    """A piece of a call; the first of them has the id and the name."""
    if call_id is None:
        function = FunctionCall.model_construct(arguments=arguments)
        return ToolCall.model_construct(index=index, function=function)
    function = FunctionCall.model_construct(name=name, arguments=arguments)
    return ToolCall.model_construct(index=index, id=call_id, type="function", function=function)


def _longer(piece: ToolCall, arguments: str) -> ToolCall:
    piece.function.arguments += arguments
    return piece
