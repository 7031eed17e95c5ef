from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .call_grammar import ToolFormat
from .reasoning import Reasoning, reasoning_named, reasoning_of
from .tool_formats import tool_format, tool_format_of

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """Marks of reasoning and tool calls in a model's output."""

    reasoning: Reasoning | None = None
    tools: ToolFormat | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        reasoning, tools = self.reasoning, self.tools
        found = () if reasoning is None else (reasoning.start, reasoning.end, reasoning.direct)
        return tuple(filter(None, found + (() if tools is None else tools.marks)))


def chat_format_of(
    template: str,
    vocab: Mapping[str, int],
    *,
    reasoning_parser: str = AUTO,
    tool_call_parser: str = AUTO,
) -> ChatFormat:
    """Return a model's chat format. "auto" detects it. Raises InvalidConfig for an unknown parser name."""
    return ChatFormat(
        reasoning=reasoning_of(template, vocab)
        if reasoning_parser == AUTO
        else reasoning_named(reasoning_parser),
        tools=tool_format_of(template) if tool_call_parser == AUTO else tool_format(tool_call_parser),
    )
