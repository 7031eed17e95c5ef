"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..api.outputs import Delta
from ..api.prompt import ChatPrompt, Message, Prompt
from ..api.sampling_params import SamplingParams
from .answer_models import json_list, usage_info
from .chat_reply import AnswerReply, ReplyPart, ReplyReader
from .chat_types import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatMessage,
    ChatRequest,
    ChunkChoice,
    ConversationFields,
    ReplyDelta,
    ReplyMessage,
    ToolCall,
)
from .endpoint import Services
from .errors import FieldError
from .exchange import Exchange, Take
from .generation import Job, Usage, new_id, run
from .logprobs import chat_logprobs, prompt_entries, shown_logprobs
from .plain_events import PlainEvents
from .prompts import prompt_cut
from .request_model import only
from .turns import NO_THINKING, check_parts, content_of, prepare_turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A request for the engine, and the parser of its output."""

    prompt: Prompt
    params: SamplingParams
    make_reader: Callable[[], ReplyReader]


async def serve_chat(services: Services, request: ChatRequest, exchange: Exchange) -> None:
    """Answer a request, whole or as a stream."""
    name = services.check_model(request.model, exchange)
    conversation = await prepare(services, request, exchange)
    if request.stream:
        only("prompt_logprobs", request.prompt_logprobs, (), "a stream has none")
    prompt: Prompt = conversation.prompt
    answer = _Answer(services, request, conversation, name)
    if request.return_token_ids:
        prompt = encoded = await services.handler.engine.prepare(prompt)
        answer.prompt_fields["prompt_token_ids"] = encoded.ids
    job = Job(
        prompts=[prompt],
        params=conversation.params,
        model=name,
        request_id=request.request_id or exchange.request_id or answer.id,
        cache_salt=request.cache_salt or "",
        priority=request.priority or 0,
        final_only=not request.stream,
    )
    deltas = run(services, exchange, job)
    async with aclosing(deltas):
        if request.stream:
            await answer.stream(deltas, exchange)
        else:
            with services.answers.held(services.handler.tenant(exchange)) as take:
                await exchange.answer(await answer.whole(deltas, take))


async def prepare(services: Services, request: ChatRequest, exchange: Exchange) -> Conversation:
    """Return the engine's request. Raises InvalidRequest for unsupported fields."""
    max_tokens = _max_tokens(request)
    cut = prompt_cut(
        services, request.truncate_prompt_tokens, request.truncation_side, max_tokens=max_tokens or 1
    )
    params = request.sampling(
        services.files.sampling,
        max_tokens=max_tokens,
        logprobs=_num_logprobs(request),
        structured=request.structured(),
    )
    turn = await prepare_turn(
        services,
        conversation_prompt(request, takes_images=services.takes_images),
        params,
        encode=lambda prompt: cut.encoded(services, exchange, prompt),
        tools=request.tools,
        choice=request.tool_choice,
        is_parallel=request.parallel_tool_calls is not False,
    )
    return Conversation(
        prompt=turn.prompt,
        params=turn.params,
        make_reader=lambda: AnswerReply(
            turn.reader(), shows_reasoning=request.include_reasoning is not False
        ),
    )


def conversation_prompt(request: ConversationFields, *, takes_images: bool = False) -> ChatPrompt:
    """Return the prompt of a conversation. Raises FieldError for unsupported parts."""
    only("chat_template", request.chat_template, (), "start the server with --chat-template")
    if not request.messages:
        raise FieldError("messages", "messages must have at least one message, got none; add one")
    check_parts("messages", request.messages, request.tools)
    variables = dict(request.chat_template_kwargs or {})
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"):
        only(f"chat_template_kwargs.{name}", variables.get(name), (), "it is not a variable of the template")
    for field in ("documents", "reasoning_effort"):
        if (value := getattr(request, field)) is not None:
            only(f"chat_template_kwargs.{field}", variables.get(field), (value,), f"{field} is given")
            variables[field] = value
    if request.reasoning_effort == "none":
        variables |= NO_THINKING
    if request.continue_final_message and request.add_generation_prompt:
        raise FieldError(
            "continue_final_message",
            "continue_final_message must not come with add_generation_prompt true; leave one of them out",
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
    """Return a message in the form of chat templates. Parts of text are joined; next to pictures, parts stay
    separate."""
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
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    if message.tool_calls is not None:
        found["tool_calls"] = [call.model_dump(exclude_unset=True) for call in message.tool_calls]
    if message.reasoning is not None:
        found.setdefault("reasoning_content", message.reasoning)
    return found


def _max_tokens(request: ChatRequest) -> int | None:
    both = request.max_completion_tokens, request.max_tokens
    if None not in both and both[0] != both[1]:
        raise FieldError(
            "max_tokens",
            f"max_tokens must be max_completion_tokens ({both[0]}), got {both[1]}; give one of them",
        )
    return both[1] if both[0] is None else both[0]


def _num_logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            raise FieldError("top_logprobs", "top_logprobs must come with logprobs true, got none; give both")
        return None
    return request.top_logprobs or 0


class _Answer:
    """Writes the response to one request."""

    def __init__(
        self, services: Services, request: ChatRequest, conversation: Conversation, name: str
    ) -> None:
        self._services = services
        self._request = request
        self._params = conversation.params
        self._make_reader = conversation.make_reader
        self._name = name
        self.id = new_id("chatcmpl")
        self._created = int(time.time())
        self._usage = Usage()
        self._prompt_logprobs: bytes | None = None
        self.prompt_fields: dict[str, Any] = {}  # fields of the response, or of its first chunk

    async def whole(self, deltas: AsyncGenerator[tuple[int, Delta], None], take: Take) -> bytes:
        """Return the response; ``take`` counts its bytes."""
        choices: dict[int, bytes] = {}
        async for _, delta in deltas:
            self._usage.add(0, delta)
            choice = await self._services.handler.message_of(delta, partial(self._whole_choice, delta))
            take(len(choice))
            choices[delta.index] = choice
        answer = ChatCompletion.model_construct(
            id=self.id,
            object="chat.completion",
            created=self._created,
            model=self._name,
            choices=[],
            usage=usage_info(self._usage),
            **self.prompt_fields,
        )
        written = json_list(choices[index] for index in sorted(choices))
        return answer.json_bytes(prompt_logprobs=self._prompt_logprobs, choices=written)

    def _whole_choice(self, delta: Delta) -> bytes:
        if delta.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = prompt_entries(delta.prompt_logprobs, self._services.texts)
            self.prompt_fields["prompt_logprobs"] = None
        reader = self._make_reader()
        message = _message(reader.read(delta))
        choice = ChatChoice.model_construct(message=message, **self._choice(delta, reader))
        return choice.json_bytes(logprobs=self._logprobs(delta))

    async def stream(self, deltas: AsyncGenerator[tuple[int, Delta], None], exchange: Exchange) -> None:
        options = self._request.stream_options
        readers = [self._make_reader() for _ in range(self._params.n)]
        begun: set[int] = set()
        plain, is_plain = PlainEvents(self._plain), self._request.has_plain_events
        async for _, delta in deltas:
            self._usage.add(0, delta)
            if not exchange.is_started:
                await exchange.start_events()
            reader = readers[delta.index]
            part = reader.read(delta)
            is_first = delta.index not in begun
            begun.add(delta.index)
            if not _is_shown(part, delta) and not is_first:
                continue
            if is_plain and not is_first and part.is_content and delta.finish_reason is None:
                await exchange.event(plain.event(delta.index, part.content))
                continue
            choice = ChunkChoice.model_construct(delta=_delta(part, is_first), **self._choice(delta, reader))
            await exchange.event(self._chunk([choice], logprobs=self._logprobs(delta)))
        if options is not None and options.include_usage:
            await exchange.event(self._chunk([], is_last=True))
        await exchange.end_events()

    def _plain(self, index: int, text: str) -> bytes:
        """Return the event of a sample that has only text."""
        delta = ReplyDelta.model_construct(content=text)
        choice = ChunkChoice.model_construct(index=index, delta=delta, logprobs=None, finish_reason=None)
        return self._chunk([choice])

    def _chunk(
        self, choices: list[ChunkChoice], *, is_last: bool = False, logprobs: bytes | None = None
    ) -> bytes:
        options = self._request.stream_options
        chunk = ChatCompletionChunk.model_construct(
            id=self.id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._name,
            choices=choices,
            **self.prompt_fields,
        )
        self.prompt_fields = {}
        if options is not None and (options.include_usage or options.continuous_usage_stats):
            shows = is_last or options.continuous_usage_stats
            chunk.usage = usage_info(self._usage) if shows else None
        return chunk.json_bytes(logprobs=logprobs)

    def _logprobs(self, delta: Delta) -> bytes | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(
            shown_logprobs(delta, self._params),
            self._services.texts,
            self._params.logprobs or 0,
            as_ids=bool(self._request.return_tokens_as_token_ids),
        )

    def _choice(self, delta: Delta, reader: ReplyReader) -> dict[str, Any]:
        """Return the fields that both forms of a choice share."""
        finish = None if delta.finish_reason is None else str(delta.finish_reason.value)
        if finish == "stop" and reader.has_called_tools:
            finish = "tool_calls"
        fields: dict[str, Any] = {"index": delta.index, "logprobs": None, "finish_reason": finish}
        if finish is not None:
            fields["stop_reason"] = self._services.stop_reason(delta, self._params)
        if self._request.return_token_ids:
            fields["token_ids"] = list(delta.token_ids)
        return fields


def _is_shown(part: ReplyPart, delta: Delta) -> bool:
    return bool(
        part.content or part.reasoning or part.tool_calls or delta.logprobs or delta.finish_reason is not None
    )


def _message(part: ReplyPart) -> ReplyMessage:
    """Return a whole message; its content is null if it has only other parts."""
    fields: dict[str, Any] = {"role": "assistant", "content": part.content, "refusal": None}
    if part.reasoning:
        fields["reasoning_content"] = fields["reasoning"] = part.reasoning
        fields["content"] = part.content or None
    if part.tool_calls:
        fields["content"] = part.content or None
        fields["tool_calls"] = [_without_index(call) for call in part.tool_calls]
    return ReplyMessage.model_construct(**fields)


def _without_index(call: ToolCall) -> ToolCall:
    return ToolCall.model_construct(id=call.id, type="function", function=call.function)


def _delta(part: ReplyPart, is_first: bool) -> ReplyDelta:
    fields: dict[str, Any] = {}
    if is_first:
        fields = {"role": "assistant", "content": ""}
    if part.content:
        fields["content"] = part.content
    if part.reasoning:
        fields["reasoning_content"] = fields["reasoning"] = part.reasoning
    if part.tool_calls:
        fields["tool_calls"] = list(part.tool_calls)
    return ReplyDelta.model_construct(**fields)
