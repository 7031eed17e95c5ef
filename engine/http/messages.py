"""/v1/messages and /v1/messages/count_tokens of the Anthropic API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from ..api.prompt import ChatPrompt
from ..api.sampling_params import SamplingParams
from ..api.structured_output import StructuredOutput
from .endpoint import Services
from .errors import FieldError
from .exchange import Exchange
from .request_model import RequestModel, only
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


_BILLING = "x-anthropic-billing-header"
_SIGNATURE = "octavo"  # clients require a signature, but thinking is not signed
_KINDS = {"reasoning": "thinking", "text": "text", "call": "tool_use"}


async def serve_messages(services: Services, request: MessagesRequest, exchange: Exchange) -> None:
    name = services.check_model(request.model, exchange)
    turn = await _turn(services, request, _params(services, request))
    shows = not (request.thinking and request.thinking.display == "omitted")
    await _Answer(turn, name, shows_thinking=shows).write(exchange, request)


async def serve_count(services: Services, request: CountRequest, exchange: Exchange) -> None:
    services.check_model(request.model, exchange)
    turn = await _turn(services, request, SamplingParams())
    ids = turn.prompt_ids or await services.handler.engine.encode(turn.prompt)
    await exchange.answer({"input_tokens": len(ids)})


def _params(services: Services, request: MessagesRequest) -> SamplingParams:
    given = sampling_of(services, request, "temperature", "top_p", "top_k")
    thinking, output = request.thinking, request.output_config
    thinks = services.handler.engine.tokenizer.chat_format.reasoning is not None
    if thinking is not None and thinks:  # models without reasoning ignore the budget
        given["max_reasoning_tokens"] = 0 if thinking.type == "disabled" else thinking.budget_tokens
    if output is not None and output.format is not None:
        given["structured"] = StructuredOutput(json_schema=output.format.schema_)
    return SamplingParams(**given, max_tokens=request.max_tokens, stop=tuple(request.stop_sequences or ()))


async def _turn(services: Services, request: MessageFields, params: SamplingParams) -> Turn:
    check_parts("messages", request.messages, request.tools)
    variables: dict[str, Any] = {}
    if request.thinking is not None and request.thinking.type != "adaptive":
        variables = dict.fromkeys(NO_THINKING, request.thinking.type == "enabled")
    if request.output_config is not None and request.output_config.effort is not None:
        variables["reasoning_effort"] = request.output_config.effort
    choice = request.tool_choice
    messages = _edited(
        request, one_system_message(_conversation(request, takes_images=services.takes_images))
    )
    is_begun = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    return await prepare_turn(
        services,
        ChatPrompt(messages, variables=variables, open_turn=not is_begun, continue_final_message=is_begun),
        params,
        tools=[_tool(index, tool) for index, tool in enumerate(request.tools or ())],
        choice=None if choice is None else _choice(choice.type, choice.name),
        is_parallel=not (choice is not None and choice.disable_parallel_tool_use),
    )


def _choice(kind: str, name: str | None) -> str | Mapping[str, Any]:
    if kind == "tool":
        return {"type": "function", "function": {"name": name}}
    return {"auto": "auto", "any": "required", "none": "none"}[kind]


def _tool(index: int, tool: Any) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise FieldError(
            f"tools[{index}].type",
            f'tools[{index}].type must be "custom" here, got {tool.type!r:.60}; built-in '
            "server tools are not available",
        )
    parameters = tool.input_schema or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    function["strict"] = tool.strict
    given = {field: value for field, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def _conversation(request: MessageFields, *, takes_images: bool) -> Iterator[dict[str, Any]]:
    if isinstance(request.system, str):
        system = request.system
    else:
        blocks = [block for block in request.system or () if not (block.text or "").startswith(_BILLING)]
        system = _texts(blocks, "system", "\n\n")
    if system:
        yield {"role": "system", "content": system}
    if not request.messages:
        raise FieldError("messages", "messages must have at least one message, got none; add one")
    for index, message in enumerate(request.messages):
        yield from _messages(message, f"messages[{index}]", takes_images=takes_images)


def _edited(request: MessageFields, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    edits = request.context_management.edits if request.context_management is not None else None
    for edit in edits or ():
        if (kept := edit.kept_turns) is not None:
            for message in [each for each in messages if "reasoning_content" in each][:-kept]:
                del message["reasoning_content"]
    return messages


def _messages(message: InputMessage, where: str, *, takes_images: bool) -> Iterator[dict[str, Any]]:
    blocks = message.content
    if isinstance(blocks, str):
        yield {"role": message.role, "content": blocks}
        return
    texts: list[str] = []
    are_pictures: list[bool] = []
    found: dict[str, Any] = {"role": message.role, "content": ""}
    for place, block in enumerate(blocks):
        name = f"{where}.content[{place}]"
        match block.type, message.role:
            case "image", "user" if takes_images:
                texts.append(_url(block.source, f"{name}.source"))
                are_pictures.append(True)
            case (("text" | "image" | "document"), ("user" | "assistant" | "system")):
                texts.append(_text(block, name))
                are_pictures.append(False)
            case "thinking", "assistant":
                found["reasoning_content"] = _given(block.thinking, f"{name}.thinking")
            case "redacted_thinking", "assistant":
                pass  # only another server can decrypt it
            case "tool_use", "assistant":
                function = {"name": _given(block.name, f"{name}.name"), "arguments": block.input or {}}
                call = {"id": _given(block.id, f"{name}.id"), "type": "function", "function": function}
                found.setdefault("tool_calls", []).append(call)
            case "tool_result", "user":
                content = "" if block.content is None else _texts(block.content, f"{name}.content", "\n")
                yield {
                    "role": "tool",
                    "tool_call_id": _given(block.tool_use_id, f"{name}.tool_use_id"),
                    "content": f"Error: {content}" if block.is_error else content,
                }
            case kind, role:
                raise FieldError(
                    f"{name}.type",
                    f"{name}.type must be a type that is served in a message of the {role}, got "
                    f"{kind!r:.60}; this model reads {'text and images' if takes_images else 'only text'}",
                )
    found["content"] = content_of(texts, are_pictures)
    if texts or message.role != "user" or not blocks:
        yield found


def _url(source: Source | None, where: str) -> str:
    source = source or Source()
    if source.type != "base64" or source.data is None:
        raise FieldError(
            where,
            f"{where} must be of type base64, because nothing is fetched, got {source.type!r:.60}; send data",
        )
    return f"data:{source.media_type or 'image'};base64,{source.data}"


def _texts(content: str | Sequence[ContentBlock], where: str, between: str) -> str:
    if isinstance(content, str):
        return content
    return between.join(_text(block, f"{where}[{place}]") for place, block in enumerate(content))


def _text(block: ContentBlock, where: str) -> str:
    match block.type:
        case "text":
            return _given(block.text, f"{where}.text")
        case "image":
            return unseen("An image")
        case "document":
            only(f"{where}.citations", block.citations, ({"enabled": False}, {}, []))
            return "\n".join(filter(None, (block.title, block.context, _document(block, f"{where}.source"))))
    raise FieldError(
        f"{where}.type",
        f"{where}.type must be text, image or document here, got {block.type!r:.60}; leave it out",
    )


def _document(block: ContentBlock, where: str) -> str:
    source = block.source or Source()
    match source.type, source.data, source.content:
        case "text", str(data), _:
            return data
        case "content", _, str(text):
            return text
        case "content", _, list(blocks):
            return _texts(blocks, f"{where}.content", "\n")
        case (("base64" | "url" | "file"), _, _):
            return unseen("A file")
    raise FieldError(
        where,
        f"{where} must be of type text, content, base64, url or file, got {source.type!r:.60}; correct it",
    )


def _given(value: str | None, where: str) -> str:
    if value is None:
        raise FieldError(where, f"{where} must be given, got nothing; add it")
    return value


class _Answer(TurnAnswer):
    def __init__(self, turn: Turn, name: str, *, shows_thinking: bool) -> None:
        super().__init__(turn, "msg", name)
        self._shows_thinking = shows_thinking
        self._places: dict[int, int] = {}

    def _whole(self) -> dict[str, Any]:
        content = [self._block(block) for block in self.blocks.shown if self._is_shown(block)]
        return self._message(content) | self._end()

    def _first(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_start", "message": self._message([])}

    def _last(self) -> Iterator[dict[str, Any]]:
        end = self._end()
        usage = end.pop("usage")
        yield {"type": "message_delta", "delta": end, "usage": usage}
        yield {"type": "message_stop"}

    def _is_shown(self, block: Block) -> bool:
        return self._shows_thinking or block.kind != "reasoning"

    def _events(self, step: Step) -> Iterator[dict[str, Any]]:
        kind, block, text = step
        if not self._is_shown(block):
            return
        place = self._places.setdefault(block.index, len(self._places))
        change = {"type": "content_block_delta", "index": place}
        if kind == "start":
            empty = self._block(Block(block.index, block.kind, name=block.name, call_id=block.call_id))
            yield {"type": "content_block_start", "index": place, "content_block": empty}
        elif kind == "stop":
            if block.kind == "reasoning":
                yield change | {"delta": {"type": "signature_delta", "signature": _SIGNATURE}}
            yield {"type": "content_block_stop", "index": place}
        else:
            named = {
                "reasoning": ("thinking_delta", "thinking"),
                "text": ("text_delta", "text"),
                "call": ("input_json_delta", "partial_json"),
            }[block.kind]
            yield change | {"delta": {"type": named[0], named[1]: text}}

    def _block(self, block: Block) -> dict[str, Any]:
        found: dict[str, Any] = {"type": _KINDS[block.kind]}
        match block.kind:
            case "reasoning":
                return found | {"thinking": block.text, "signature": _SIGNATURE if block.text else ""}
            case "text":
                return found | {"text": block.text}
        return found | {"id": block.call_id, "name": block.name, "input": json.loads(block.text or "{}")}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _end(self) -> dict[str, Any]:
        last = self.last
        assert last is not None
        reason, sequence = "end_turn", None
        if self.was_cut:
            reason = "max_tokens"
        elif self.blocks.has_calls:
            reason = "tool_use"
        elif isinstance(last.stop_match, str):
            reason, sequence = "stop_sequence", last.stop_match
        return {"stop_reason": reason, "stop_sequence": sequence, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
