"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from ..api.outputs import Delta, FinishReason
from ..api.prompt import ChatPrompt, Message
from ..chat.answer import AnswerReader
from ..chat.events import CallArguments, CallBegin, CallEnd, CallMalformed, ContentText, ReasoningText
from .chat_types import ChatMessage, ChatRequest, ConversationFields
from .endpoint import Services
from .errors import FieldError
from .exchange import Exchange, Take, json_list, json_of
from .generation import Job, Usage, new_id, run
from .logprobs import chat_logprobs, prompt_entries, shown_logprobs
from .prompts import prompt_cut
from .request_model import agreed, only
from .turns import NO_THINKING, Turn, check_parts, content_of, prepare_turn


async def serve_chat(services: Services, request: ChatRequest, exchange: Exchange) -> None:
    name = services.check_model(request.model, exchange)
    turn = await _turn(services, request, exchange)
    if request.stream:
        only("prompt_logprobs", request.prompt_logprobs, (), "a stream has none")
    prompt, answer = turn.prompt, _Answer(services, request, turn, name, exchange.request_id)
    if request.return_token_ids:
        prompt = encoded = await services.handler.engine.prepare(prompt)
        answer.prompt_fields["prompt_token_ids"] = encoded.ids
    job = Job(
        prompts=[prompt],
        params=turn.params,
        model=name,
        request_id=exchange.request_id or answer.id,
        cache_salt=request.cache_salt or "",
        priority=request.priority or 0,
        final_only=not request.stream,
    )
    deltas = run(services, exchange, job)
    async with aclosing(deltas):
        if request.stream:
            await answer.stream(deltas, exchange)
        else:
            with services.answers.hold(services.handler.tenant(exchange)) as take:
                await exchange.answer_bytes(await answer.whole(deltas, take))


async def _turn(services: Services, request: ChatRequest, exchange: Exchange) -> Turn:
    max_tokens = agreed(request, "max_tokens", "max_completion_tokens")
    cut = prompt_cut(
        services, request.truncate_prompt_tokens, request.truncation_side, max_tokens=max_tokens or 1
    )
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


class _Answer:
    def __init__(self, services: Services, request: ChatRequest, turn: Turn, name: str, given: str) -> None:
        self._services = services
        self._request = request
        self._turn = turn
        self._name = name
        self.id = new_id("chatcmpl", given)
        self._created = int(time.time())
        self._usage = Usage()
        self._prompt_logprobs: bytes | None = None
        self.prompt_fields: dict[str, Any] = {}

    def _reader(self) -> ReplyReader:
        return ReplyReader(self._turn.reader(), shows_reasoning=self._request.include_reasoning is not False)

    async def whole(self, deltas: AsyncGenerator[tuple[int, Delta], None], take: Take) -> bytes:
        choices: dict[int, bytes] = {}
        async for _, delta in deltas:
            self._usage.add(0, delta)
            choice = await self._services.handler.message_of(delta, partial(self._whole_choice, delta))
            take(len(choice))
            choices[delta.index] = choice
        answer = self._answer("chat.completion", []) | {"usage": self._usage.info()} | self.prompt_fields
        written = json_list(choices[index] for index in sorted(choices))
        return json_of(answer, prompt_logprobs=self._prompt_logprobs, choices=written)

    def _whole_choice(self, delta: Delta) -> bytes:
        if delta.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = prompt_entries(delta.prompt_logprobs, self._services.texts)
            self.prompt_fields["prompt_logprobs"] = None
        reader = self._reader()
        message = _message(reader.read(delta))
        choice = self._choice(delta, reader) | {"message": message}
        return json_of(choice, logprobs=self._logprobs(delta))

    async def stream(self, deltas: AsyncGenerator[tuple[int, Delta], None], exchange: Exchange) -> None:
        options = self._request.stream_options
        readers = [self._reader() for _ in range(self._turn.params.n)]
        begun: set[int] = set()
        async for _, delta in deltas:
            self._usage.add(0, delta)
            if not exchange.is_started:
                await exchange.start_events()
            reader = readers[delta.index]
            fields = reader.read(delta)
            if delta.index not in begun:
                begun.add(delta.index)
                fields = {"role": "assistant", "content": ""} | fields
            if fields or delta.logprobs or delta.finish_reason is not None:
                choice = self._choice(delta, reader) | {"delta": fields}
                await exchange.event(json_of(self._chunk([choice]), logprobs=self._logprobs(delta)))
        if options is not None and options.include_usage:
            await exchange.event(json_of(self._chunk([], is_last=True)))
        await exchange.end_events()

    def _chunk(self, choices: list[dict[str, Any]], *, is_last: bool = False) -> dict[str, Any]:
        options = self._request.stream_options
        chunk = self._answer("chat.completion.chunk", choices) | self.prompt_fields
        self.prompt_fields = {}
        if options is not None and (options.include_usage or options.continuous_usage_stats):
            shows = is_last or options.continuous_usage_stats
            chunk["usage"] = self._usage.info() if shows else None
        return chunk

    def _answer(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._name,
            "choices": choices,
        }

    def _logprobs(self, delta: Delta) -> bytes | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(
            shown_logprobs(delta, self._turn.params),
            self._services.texts,
            self._turn.params.logprobs or 0,
            as_ids=bool(self._request.return_tokens_as_token_ids),
        )

    def _choice(self, delta: Delta, reader: ReplyReader) -> dict[str, Any]:
        finish = None if delta.finish_reason is None else str(delta.finish_reason.value)
        if finish == "stop" and reader.has_called_tools:
            finish = "tool_calls"
        fields: dict[str, Any] = {"index": delta.index, "logprobs": None, "finish_reason": finish}
        if finish is not None:
            fields["stop_reason"] = self._services.stop_reason(delta, self._turn.params)
        if self._request.return_token_ids:
            fields["token_ids"] = list(delta.token_ids)
        return fields


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
