"""What the text of one sample of a chat means: content, reasoning and tool calls, as they come.

``ReplyReader`` is the place of parsers: ``chat.py`` makes one for each sample, hands it the sample's deltas,
and writes what it returns, be the answer whole or a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..api.outputs import Delta
from .chat_types import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPart:
    """What is new of a reply. ``tool_calls``: pieces of calls, each with its call's index."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class ReplyReader(Protocol):
    """Reads one sample of a chat."""

    @property
    def has_called_tools(self) -> bool:
        """Whether the output so far has calls of tools, for the finish reason."""
        ...

    def read(self, delta: Delta) -> ReplyPart:
        """What the delta adds; the sample's last delta has a finish reason, and nothing is held back then."""
        ...


class PlainReader:
    """All text is content."""

    has_called_tools = False

    def read(self, delta: Delta) -> ReplyPart:
        return ReplyPart(content=delta.text)
