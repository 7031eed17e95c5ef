from __future__ import annotations

from typing import Any, ClassVar

from .request_model import RequestModel, only
from .sampling import SamplingFields

TEMPLATE_WRITES = "the chat template writes special tokens"


class ImageURL(RequestModel):
    """An image as a data: URL. ``detail`` has no effect."""

    url: str
    detail: str | None = None


class ContentPart(RequestModel):
    type: str
    text: str | None = None
    image_url: ImageURL | None = None

    fields_of: ClassVar = {"text": "text", "image_url": "image_url"}


class CalledFunction(RequestModel):
    name: str | None = None
    arguments: Any = None


class EarlierCall(RequestModel):
    id: str | None = None
    type: str | None = None
    function: CalledFunction | None = None
    index: int | None = None
    provider_specific_fields: dict[str, Any] | None = None  # LiteLLM copies other fields to it

    allowed: ClassVar = {"type": ("function",)}


class ChatMessage(RequestModel):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None
    annotations: list[Any] | None = None
    provider_specific_fields: dict[str, Any] | None = None

    allowed: ClassVar = {"annotations": ([],)}


class ConversationFields(RequestModel):
    messages: list[ChatMessage] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None


class ChatRequest(SamplingFields, ConversationFields):
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    include_reasoning: bool | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    verbosity: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def check_served(self) -> None:
        super().check_served()
        only("echo", self.echo, (False,))
        only("add_special_tokens", self.add_special_tokens, (False,), TEMPLATE_WRITES)
        only("functions", self.functions, (), "use tools")
        only("function_call", self.function_call, (), "use tool_choice")
        only("modalities", self.modalities, (["text"],))
        only("store", self.store, (False,), "nothing is stored")
        only("service_tier", self.service_tier, ("auto", "default"))
        only("verbosity", self.verbosity, ("medium",))
