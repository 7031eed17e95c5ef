"""/v1/responses of the OpenAI API. Responses are not stored."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

from ..api.prompt import ChatPrompt
from ..api.sampling_params import SamplingParams
from ..api.structured_output import StructuredOutput
from .endpoint import Services
from .errors import FieldError
from .exchange import Exchange
from .generation import new_id
from .request_model import RequestModel, only
from .sampling import JsonSchemaFormat
from .turns import (
    NO_THINKING,
    Block,
    Step,
    Turn,
    TurnAnswer,
    check_parts,
    content_of,
    one_system_message,
    prepare_turn,
    sampling_of,
    unseen,
)


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


_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_UNSEEN = {"input_image": "An image", "input_file": "A file"}
_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


async def serve_responses(services: Services, request: ResponsesRequest, exchange: Exchange) -> None:
    request.check_served()
    name = services.check_model(request.model, exchange)
    answer = _Answer(await _turn(services, request), request, name)
    await answer.write(exchange, request)


async def _turn(services: Services, request: ResponsesRequest) -> Turn:
    if isinstance(request.input, list):
        check_parts("input", request.input, request.tools)
    given = sampling_of(services, request, "temperature", "top_p")
    variables: dict[str, Any] = {}
    if request.reasoning is not None and request.reasoning.effort is not None:
        variables["reasoning_effort"] = request.reasoning.effort
        if request.reasoning.effort == "none":
            variables |= NO_THINKING
    params = SamplingParams(**given, max_tokens=request.max_output_tokens, structured=_structured(request))
    return await prepare_turn(
        services,
        ChatPrompt(one_system_message(_conversation(request, services.takes_images)), variables=variables),
        params,
        tools=[_tool(tool, space) for _, tool, space in functions_of(request.tools)],
        choice=_choice(request.tool_choice),
        is_parallel=request.parallel_tool_calls is not False,
    )


def _structured(request: ResponsesRequest) -> StructuredOutput | None:
    form = request.text.format if request.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return StructuredOutput(json_object=True)
    if form.schema_ is None:
        raise FieldError("text.format.schema", "text.format.schema must be given, got nothing; add it")
    return StructuredOutput(json_schema=form.schema_)


def _choice(choice: str | Mapping[str, Any] | None) -> str | Mapping[str, Any] | None:
    if isinstance(choice, Mapping) and choice.get("type") == "function" and "function" not in choice:
        others = {key: value for key, value in choice.items() if key != "name"}
        return others | {"function": {"name": choice.get("name")}}
    return choice


def _full_name(name: str | None, namespace: str | None) -> str | None:
    return name if namespace is None else f"{namespace}.{name}"


def _tool(tool: FunctionTool, namespace: str | None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": _full_name(tool.name, namespace)}
    for field in ("description", "parameters", "strict"):
        if (value := getattr(tool, field)) is not None:
            function[field] = value
    return {"type": "function", "function": function}


def _conversation(request: ResponsesRequest, takes_images: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if request.instructions:
        found.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*found, {"role": "user", "content": request.input}]
    if not request.input:
        raise FieldError("input", "input must have at least one item, got none; add one")
    for index, item in enumerate(request.input):
        role, fields = _item(item, f"input[{index}]", takes_images)
        last = found[-1] if found else {}
        if (
            role == "assistant"
            and last.get("role") == "assistant"
            and not (fields["content"] and last["content"])
        ):
            last["content"] = last["content"] or fields["content"]
            for name in ("tool_calls", "reasoning_content"):
                if name in fields:
                    last.setdefault(name, []).extend(fields[name])
        else:
            found.append({"role": role, **fields})
    for message in found:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return found


def _item(item: InputItem, where: str, takes_images: bool) -> tuple[str, dict[str, Any]]:
    match item.type:
        case "message" | None:
            role = _ROLES.get(item.role or "")
            if role is None:
                raise FieldError(
                    f"{where}.role",
                    f"{where}.role must be user, assistant, system or developer, got {item.role!r:.60}; use "
                    "one of these roles",
                )
            takes_images = takes_images and role == "user"
            return role, {"content": _content(item.content, f"{where}.content", takes_images)}
        case "function_call":
            function = {"name": _full_name(item.name, item.namespace), "arguments": item.arguments or "{}"}
            call = {"id": item.call_id or "", "type": "function", "function": function}
            return "assistant", {"content": "", "tool_calls": [call]}
        case "function_call_output":
            content = _text(item.output, f"{where}.output")
            return "tool", {"tool_call_id": item.call_id or "", "content": content}
        case "reasoning":
            text = _text(item.content, f"{where}.content") or _decoded(item.encrypted_content)
            text = text or _text(item.summary, f"{where}.summary")
            return "assistant", {"content": "", "reasoning_content": [text]}
    raise FieldError(
        f"{where}.type",
        f"{where}.type must be message, function_call, function_call_output or reasoning, got "
        f"{item.type!r:.60}; other items are not served",
    )


def _text(content: str | Sequence[InputPart] | None, where: str) -> str:
    return cast(str, _content(content, where, takes_images=False))


def _content(
    content: str | Sequence[InputPart] | None, where: str, takes_images: bool
) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    are_pictures = [takes_images and part.type == "input_image" for part in content]
    for index, part in enumerate(content):
        if are_pictures[index]:
            texts.append(part.image_url or "")
        elif part.type in _UNSEEN:
            texts.append(unseen(_UNSEEN[part.type]))
        elif part.type in _PARTS and part.text is not None:
            texts.append(part.text)
        else:
            raise FieldError(
                f"{where}[{index}].type",
                f"{where}[{index}].type must be input_text or output_text with a text, got "
                f"{part.type!r:.60}; other parts are not served",
            )
    return content_of(texts, are_pictures) if any(are_pictures) else "".join(texts)


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decoded(content: str | None) -> str:
    try:
        return base64.b64decode(content or "", validate=True).decode()
    except ValueError:
        return ""


class _Answer(TurnAnswer):
    def __init__(self, turn: Turn, request: ResponsesRequest, name: str) -> None:
        super().__init__(turn, "resp", name)
        self._request = request
        self._created = int(time.time())
        self._ids: dict[int, str] = {}
        self._namespaces = {
            _full_name(tool.name, space): {"name": tool.name, "namespace": space}
            for _, tool, space in functions_of(request.tools)
            if space is not None
        }
        self._sequence = 0

    def _whole(self) -> dict[str, Any]:
        shown = self.blocks.shown
        return self._response([self._item(block, self._status_of(block)) for block in shown])

    def _first(self) -> Iterator[dict[str, Any]]:
        begun = self._response([], status="in_progress")
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def _last(self) -> Iterator[dict[str, Any]]:
        items = [self._item(block, self._status_of(block)) for block in self.blocks.all]
        response = self._response(items)
        yield self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _events(self, step: Step) -> Iterator[dict[str, Any]]:
        kind, block, text = step
        here = {"output_index": block.index, "item_id": self._id_of(block)}
        part = {**here, "content_index": 0}
        stem = "reasoning_text" if block.kind == "reasoning" else "output_text"
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if kind == "start":
            empty = Block(block.index, block.kind, name=block.name, call_id=block.call_id)
            item = self._item(empty, "in_progress")
            if block.kind != "call":
                item["content"] = []
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind != "call":
                yield self._event("response.content_part.added", **part, part=_part(block.kind, ""))
        elif kind == "delta" and block.kind == "call":
            yield self._event("response.function_call_arguments.delta", **here, delta=text)
        elif kind == "delta":
            yield self._event(f"response.{stem}.delta", **part, delta=text, **more)
        else:
            if block.kind != "call":
                yield self._event(f"response.{stem}.done", **part, text=block.text, **more)
                yield self._event("response.content_part.done", **part, part=_part(block.kind, block.text))
            elif block.is_complete:
                done = {**here, **self._named(block), "arguments": block.text}
                yield self._event("response.function_call_arguments.done", **done)
            item = self._item(block, self._status_of(block))
            yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _id_of(self, block: Block) -> str:
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[block.kind]
        return self._ids.setdefault(block.index, new_id(prefix))

    def _status_of(self, block: Block) -> str:
        last = block is self.blocks.all[-1]
        return "completed" if block.is_complete and not (last and self.was_cut) else "incomplete"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id_of(block), "status": status}
        match block.kind:
            case "text":
                part = _part("text", block.text)
                return item | {"type": "message", "role": "assistant", "content": [part]}
            case "reasoning":
                item |= {"type": "reasoning", "summary": [], "content": [_part("reasoning", block.text)]}
                if ENCRYPTED in (self._request.include or ()):
                    item["encrypted_content"] = _encoded(block.text)
                return item
        item |= {"type": "function_call", "call_id": block.call_id, "arguments": block.text}
        return item | self._named(block)

    def _named(self, block: Block) -> dict[str, Any]:
        return self._namespaces.get(block.name, {"name": block.name})

    def _response(self, items: list[dict[str, Any]], status: str | None = None) -> dict[str, Any]:
        request = self._request
        if status is None:
            status = "incomplete" if self.was_cut else "completed"
        params = self.turn.params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self.name,
            "output": items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}} if request.text is None else _given(request.text),
            "tool_choice": request.tool_choice or "auto",
            "tools": [_given(tool) for tool in request.tools or ()],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "metadata": request.metadata or {},
        }

    def _usage(self) -> dict[str, Any]:
        usage, tokenizer = self.usage, self.turn.services.handler.engine.tokenizer
        texts = (block.text for block in self.blocks.all if block.kind == "reasoning")
        num_reasoning = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": min(num_reasoning, usage.completion_tokens)},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _given(model: Any) -> dict[str, Any]:
    return dict(model.model_dump(exclude_unset=True, by_alias=True))
