from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from .errors import FieldError
from .request_model import RequestModel, only
from .sampling import JsonSchemaFormat


class InputPart(RequestModel):
    type: str
    text: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    image_url: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: str | None = None

    fields_of: ClassVar = {
        **dict.fromkeys(("input_text", "summary_text", "reasoning_text"), "text"),
        **dict.fromkeys(("text", "output_text"), "text annotations logprobs"),
        "input_image": "image_url file_id detail",
        "input_file": "file_id file_data file_url filename detail",
    }


class InputItem(RequestModel):
    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None

    fields_of: ClassVar = {
        **dict.fromkeys((None, "message"), "id status role content phase"),
        "function_call": "id status call_id name namespace arguments",
        "function_call_output": "id status call_id name namespace output",
        "reasoning": "id status summary content encrypted_content",
    }


class FunctionTool(RequestModel):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[FunctionTool] | None = None

    fields_of: ClassVar = {
        "function": "name description parameters strict",
        "namespace": "name description tools",
    }


def functions_of(
    tools: Sequence[FunctionTool] | None, where: str = "tools", namespace: str | None = None
) -> Iterator[tuple[str, FunctionTool, str | None]]:
    """Yield the functions of all tools. Raises FieldError for unsupported tools."""
    for index, tool in enumerate(tools or ()):
        here = f"{where}[{index}]"
        if tool.type == "namespace" and namespace is None and tool.name:
            yield from functions_of(tool.tools, f"{here}.tools", tool.name)
        elif tool.type == "function":
            yield here, tool, namespace
        else:
            raise FieldError(
                f"{here}.type",
                f'{here}.type must be "function" or "namespace" here, got {tool.type!r:.60}; '
                "built-in server tools are not available, so turn the tool off in the client",
            )


class TextFormat(JsonSchemaFormat):
    type: str

    fields_of: ClassVar = {"text": "", "json_object": ""}
    allowed: ClassVar = {"type": ("text", "json_object", "json_schema")}


class TextConfig(RequestModel):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(RequestModel):
    effort: str | None = None
    summary: str | None = None


class ResponsesStreamOptions(RequestModel):
    include_obfuscation: bool | None = None


class ResponsesRequest(RequestModel):
    """Request of /v1/responses. It contains the whole conversation."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    client_metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def client_path(self, path: str) -> str:
        places = [where for where, _, _ in functions_of(self.tools)]
        return re.sub(r"^tools\[(\d+)\]\.function", lambda found: places[int(found[1])], path)

    def check_served(self) -> None:
        only("store", self.store, (False,), "nothing is stored")
        only("background", self.background, (False,))
        only("truncation", self.truncation, ("disabled",))
        only("top_logprobs", self.top_logprobs, (0,))
        only("service_tier", self.service_tier, ("auto", "default"))
        if self.text is not None:
            only("text.verbosity", self.text.verbosity, ("medium",))
        if self.reasoning is not None:
            only("reasoning.summary", self.reasoning.summary, ("auto",), "the reasoning itself is given")
        if self.stream_options is not None:
            only("stream_options.include_obfuscation", self.stream_options.include_obfuscation, (False,))
        for each in self.include or ():
            if each != ENCRYPTED:
                raise FieldError(
                    "include", f"include must contain only {ENCRYPTED}, got {each!r:.60}; leave it out"
                )


ENCRYPTED = "reasoning.encrypted_content"
