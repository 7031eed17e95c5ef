"""Requests of /v1/messages, in the form of the Anthropic API."""

from __future__ import annotations

from typing import Any

from .errors import FieldError
from .request_model import RequestModel, only


class ContentBlock(RequestModel):
    """A block of a message's content; its type determines its fields."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None  # for redacted_thinking
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    source: dict[str, Any] | None = None  # for images and documents
    title: str | None = None
    context: str | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None  # ignored: prefixes are always cached
    citations: list[Any] | dict[str, Any] | None = None
    caller: dict[str, Any] | None = None


class InputMessage(RequestModel):
    """A message of the conversation."""

    role: str
    content: str | list[ContentBlock]


class ToolParam(RequestModel):
    """A tool that the client executes."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed


class ToolChoice(RequestModel):
    """``tool_choice``."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    """``thinking``."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(RequestModel):
    """``output_config.format``."""

    type: str
    schema_: dict[str, Any] | None = None


class OutputConfig(RequestModel):
    """``output_config``."""

    effort: str | None = None
    format: OutputFormat | None = None


class ContextEdit(RequestModel):
    """An edit of ``context_management``. ``keep``: "all", or the number of turns that keep their thinking."""

    type: str
    keep: str | dict[str, Any] | None = None

    @property
    def kept_turns(self) -> int | None:
        """Number of latest turns that keep their thinking; None: all. Raises FieldError for an unsupported
        edit."""
        if self.type == "clear_thinking_20251015" and self.keep in (None, "all"):
            return 1 if self.keep is None else None
        if self.type == "clear_thinking_20251015" and isinstance(self.keep, dict):
            value = self.keep.get("value")
            if self.keep.get("type") == "thinking_turns" and type(value) is int and value > 0:
                return value
        raise FieldError(
            "context_management",
            "context_management.edits must be clear_thinking_20251015, keeping all or a positive number of "
            f"thinking_turns, got {self.type!r:.60} keeping {self.keep!r:.60}; leave others out",
        )


class ContextManagement(RequestModel):
    """``context_management``."""

    edits: list[ContextEdit] | None = None


class MessageFields(RequestModel):
    """Fields of both messages and count_tokens requests."""

    model: str | None = None
    messages: list[InputMessage]
    system: str | list[ContentBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = None


class CountRequest(MessageFields):
    """A request of /v1/messages/count_tokens."""


class MessagesRequest(MessageFields):
    """A request of /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None  # the client's own user id
    service_tier: str | None = None

    def check_served(self) -> None:
        """Raise FieldError for unsupported values."""
        only("service_tier", self.service_tier, ("auto", "standard_only"))
        if self.thinking is not None and self.thinking.type not in ("enabled", "disabled", "adaptive"):
            raise FieldError(
                "thinking.type",
                "thinking.type must be enabled, disabled or adaptive, got "
                f"{self.thinking.type!r:.60}; use one",
            )
        only("thinking.display", self.thinking and self.thinking.display, ("summarized", "omitted"))
