from __future__ import annotations

from typing import Any, ClassVar, Literal

from .errors import FieldError
from .request_model import RequestModel


class CacheControl(RequestModel):
    """The field ``cache_control``. It has no effect, because prefixes are always cached."""

    type: str
    ttl: str | None = None
    scope: str | None = None

    allowed: ClassVar = {"type": ("ephemeral",)}


class Source(RequestModel):
    type: str | None = None
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None
    content: str | list[ContentBlock] | None = None

    fields_of: ClassVar = {
        **dict.fromkeys(("base64", "text"), "media_type data"),
        "url": "url", "file": "file_id", "content": "content",
    }  # fmt: skip


class ContentBlock(RequestModel):
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
    source: Source | None = None
    title: str | None = None
    context: str | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    citations: list[Any] | dict[str, Any] | None = None
    caller: dict[str, Any] | None = None

    allowed: ClassVar = {"caller": ({"type": "direct"},)}
    fields_of: ClassVar = {
        "text": "text citations cache_control",
        "thinking": "thinking signature cache_control",
        "redacted_thinking": "data cache_control",
        "tool_use": "id name input caller cache_control",
        "tool_result": "tool_use_id content is_error cache_control",
        "image": "source cache_control",
        "document": "source title context citations cache_control",
    }


class InputMessage(RequestModel):
    role: str
    content: str | list[ContentBlock]

    allowed: ClassVar = {"role": ("user", "assistant", "system")}


class ToolParam(RequestModel):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed


class ToolChoice(RequestModel):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    fields_of: ClassVar = dict.fromkeys(("auto", "any", "none"), "disable_parallel_tool_use")
    allowed: ClassVar = {"type": ("auto", "any", "tool", "none")}


class Thinking(RequestModel):
    type: str
    budget_tokens: int | None = None
    display: str | None = None

    fields_of: ClassVar = {"disabled": ""}
    allowed: ClassVar = {"type": ("enabled", "disabled", "adaptive"), "display": ("summarized", "omitted")}


class OutputFormat(RequestModel):
    type: str
    schema_: dict[str, Any]

    allowed: ClassVar = {"type": ("json_schema",)}


class OutputConfig(RequestModel):
    effort: str | None = None
    format: OutputFormat | None = None


class ContextEdit(RequestModel):
    """An edit in ``context_management``. ``keep`` is "all" or a number of turns."""

    type: str
    keep: str | dict[Literal["type", "value"], Any] | None = None

    @property
    def kept_turns(self) -> int | None:
        """Return how many of the latest turns keep their thinking; None for all."""
        if self.type == "clear_thinking_20251015" and self.keep in (None, "all"):
            return 1 if self.keep is None else None
        if self.type == "clear_thinking_20251015" and isinstance(self.keep, dict):
            value = self.keep.get("value")
            if self.keep.get("type") == "thinking_turns" and type(value) is int and value > 0:
                return value
        raise FieldError(
            "context_management",
            "context_management.edits must be clear_thinking_20251015, keeping all or a positive number of "
            f"thinking_turns, got {self.type!r:.60} keeping {self.keep!r:.60}; leave other edits out",
        )


class ContextManagement(RequestModel):
    edits: list[ContextEdit] | None = None


class MessageFields(RequestModel):
    model: str | None = None
    messages: list[InputMessage]
    system: str | list[ContentBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None

    def client_path(self, path: str) -> str:
        return path.replace(".function.parameters", ".input_schema").replace(".function", "")


class CountRequest(MessageFields): ...


class MessagesRequest(MessageFields):
    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[Literal["user_id"], str | None] | None = None
    service_tier: str | None = None

    allowed: ClassVar = {"service_tier": ("auto", "standard_only")}
