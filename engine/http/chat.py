"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any, ClassVar

from ..api.outputs import Delta, FinishReason
from ..api.prompt import ChatPrompt, Message
from ..chat.answer import AnswerReader
from ..chat.events import CallArguments, CallBegin, CallEnd, CallMalformed, ContentText, ReasoningText
from .choices import ChoicesAnswer
from .endpoint import Services
from .errors import FieldError
from .exchange import Exchange, json_of
from .logprobs import chat_logprobs, prompt_entries, shown_logprobs
from .prompts import prompt_cut
from .request_model import RequestModel, agreed, only
from .sampling import SamplingFields
from .turns import NO_THINKING, Turn, check_parts, content_of, prepare_turn

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


async def serve_chat(services: Services, request: ChatRequest, exchange: Exchange) -> None:
    name = services.check_model(request.model, exchange)
    turn = await _turn(services, request, exchange)
    if request.stream:
        only("prompt_logprobs", request.prompt_logprobs, (), "a stream has none")
    answer, prompt = _Answer(request, turn, exchange, name), turn.prompt
    if request.return_token_ids:
        prompt = encoded = await services.handler.engine.prepare(prompt)
        answer.fields["prompt_token_ids"] = encoded.ids
    await answer.write([prompt])


async def _turn(services: Services, request: ChatRequest, exchange: Exchange) -> Turn:
    max_tokens = agreed(request, "max_tokens", "max_completion_tokens")
    cut = prompt_cut(services, request, max_tokens=max_tokens or 1)
    params = request.sampling(
        services.files.sampling,
        max_tokens=max_tokens,
        logprobs=_num_logprobs(request),
        structured=request.structured(),
    )
    return await prepare_turn(
        services,
        conversation_prompt(request, takes_images=services.takes_images),
        params,
        encode=lambda prompt: cut.encoded(services, exchange, prompt),
        tools=request.tools,
        choice=request.tool_choice,
        is_parallel=request.parallel_tool_calls is not False,
    )


def conversation_prompt(request: ConversationFields, *, takes_images: bool = False) -> ChatPrompt:
    """Return the prompt of a conversation. Raises FieldError for unsupported parts."""
    only("chat_template", request.chat_template, (), "start the server with --chat-template")
    if not request.messages:
        raise FieldError("messages", "messages must have at least one message, got none; add one")
    check_parts("messages", request.messages, request.tools)
    variables = dict(request.chat_template_kwargs or {})
    fields: dict[str, Any] = {"documents": request.documents, "reasoning_effort": request.reasoning_effort}
    for name, value in (fields | (NO_THINKING if request.reasoning_effort == "none" else {})).items():
        if value is not None:
            only(f"chat_template_kwargs.{name}", variables.get(name), (value,), "another field sets it")
            variables[name] = value
    if request.continue_final_message and request.add_generation_prompt:
        raise FieldError(
            "continue_final_message",
            "continue_final_message must not come with add_generation_prompt true; leave out one of the two",
        )
    return ChatPrompt(
        [
            message_of(message, f"messages[{index}]", takes_images=takes_images)
            for index, message in enumerate(request.messages)
        ],
        tools=request.tools or None,
        variables=variables,
        open_turn=request.add_generation_prompt is not False and not request.continue_final_message,
        continue_final_message=bool(request.continue_final_message),
    )


def message_of(message: ChatMessage, where: str, *, takes_images: bool) -> Message:
    """Convert a message for chat templates. Text parts are joined."""
    content: str | list[dict[str, Any]] | None = None
    if isinstance(message.content, str) or message.content is None:
        content = message.content
    else:
        for index, part in enumerate(message.content):
            if not (part.type == "text" and part.text is not None) and not (
                takes_images and part.type == "image_url" and part.image_url is not None
            ):
                name, rule = f"{where}.content[{index}]", 'of type "text"'
                rule = f'{rule} or "image_url"' if takes_images else rule
                what = "text and images" if takes_images else "only text"
                raise FieldError(
                    name, f"{name} must be {rule} here, got {part.type!r:.60}; this model reads {what}"
                )
        content = content_of(
            [part.text or "" if part.image_url is None else part.image_url.url for part in message.content],
            [part.image_url is not None for part in message.content],
        )
    found: dict[str, Any] = {"role": message.role, "content": content or ""}
    if message.role == "developer":
        found["role"] = "system"  # the name that chat templates know
    reasoning = agreed(message, "reasoning", "reasoning_content", f"{where}.")
    others = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    found |= {name: value for name, value in others.items() if value is not None}
    if message.tool_calls is not None:
        found["tool_calls"] = [call.model_dump(exclude_unset=True) for call in message.tool_calls]
    return found


def _num_logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            raise FieldError("top_logprobs", "top_logprobs must come with logprobs true; give both")
        return None
    return request.top_logprobs or 0


class _Answer(ChoicesAnswer):
    prefix, kinds = "chatcmpl", ("chat.completion", "chat.completion.chunk")
    request: ChatRequest

    def __init__(self, request: ChatRequest, turn: Turn, exchange: Exchange, name: str) -> None:
        super().__init__(turn.services, exchange, request, turn.params, name)
        shows = request.include_reasoning is not False
        self._readers = [ReplyReader(turn.reader(), shows_reasoning=shows) for _ in range(turn.params.n)]
        self._begun: set[int] = set()

    def choice(self, _prompt: int, index: int, delta: Delta) -> bytes:
        reader = self._readers[index]
        fields = reader.read(delta)
        if self.request.stream:
            if index not in self._begun:
                self._begun.add(index)
                fields = {"role": "assistant", "content": ""} | fields
            if not self.is_sent(delta, fields):
                return b""
        elif delta.prompt_logprobs is not None and not self.parts:
            self.parts["prompt_logprobs"] = prompt_entries(delta.prompt_logprobs, self.services.texts)
            self.fields["prompt_logprobs"] = None
        choice: dict[str, Any] = {"index": index, "logprobs": None} | self.finish(delta)
        if choice["finish_reason"] == "stop" and reader.has_called_tools:
            choice["finish_reason"] = "tool_calls"
        if self.request.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        choice |= {"delta": fields} if self.request.stream else {"message": _message(fields)}
        return json_of(choice, logprobs=self._logprobs(delta))

    def _logprobs(self, delta: Delta) -> bytes | None:
        if not self.request.logprobs:
            return None
        return chat_logprobs(
            shown_logprobs(delta, self.params),
            self.services.texts,
            self.params.logprobs or 0,
            as_ids=bool(self.request.return_tokens_as_token_ids),
        )


def _message(fields: dict[str, Any]) -> dict[str, Any]:
    for call in fields.get("tool_calls", ()):
        del call["index"]
    content = None if fields else ""
    return {"role": "assistant", "content": content, "refusal": None} | fields


class ReplyReader:
    def __init__(self, reader: AnswerReader, *, shows_reasoning: bool) -> None:
        self._reader = reader
        self._shows_reasoning = shows_reasoning
        self.has_called_tools = False

    def read(self, delta: Delta) -> dict[str, Any]:
        events = self._reader.add(delta.text)
        if delta.finish_reason is not None:
            events += self._reader.finish(was_cut=delta.finish_reason is FinishReason.LENGTH)
        content, reasoning = "", ""
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            match event:
                case ContentText(text):
                    content += text
                case ReasoningText(text) if self._shows_reasoning:
                    reasoning += text
                case CallBegin(index, call_id, name):
                    function = {"name": name, "arguments": ""}
                    calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
                case CallArguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
                case CallMalformed(text, begun):
                    content += text
                    if begun is not None:
                        calls.pop(begun, None)
                case CallEnd():
                    self.has_called_tools = True
        fields: dict[str, Any] = {"content": content} if content else {}
        if reasoning:
            fields |= {"reasoning_content": reasoning, "reasoning": reasoning}
        return fields | ({"tool_calls": list(calls.values())} if calls else {})
