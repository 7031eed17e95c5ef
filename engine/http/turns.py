"""Chat turns for all APIs. Output is split into blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any, Literal, TypeAlias

from ..api.outputs import Delta, FinishReason
from ..api.prompt import ChatPrompt, Prompt
from ..api.sampling_params import SamplingParams
from ..chat.answer import AnswerReader
from ..chat.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallMalformed,
    ContentText,
    Event,
    ReasoningText,
)
from ..chat.tool_choice import ToolUse, tool_use
from .endpoint import Services
from .errors import FieldError
from .exchange import Exchange
from .generation import Usage, new_id, run
from .sampling import keep_likeliest

NO_THINKING = {"enable_thinking": False, "thinking": False}  # template variables that turn reasoning off
MAX_PARTS = 2048  # messages, content parts and tools of one conversation
Kind: TypeAlias = Literal["reasoning", "text", "call"]


def unseen(kind: str) -> str:
    """Return a placeholder for content that a text model cannot read."""
    return f"[{kind} is here, which this model cannot read: it reads text alone]"


def check_parts(field: str, messages: Sequence[Any], tools: Sequence[Any] | None) -> None:
    """Raise FieldError if a conversation has more than ``MAX_PARTS`` parts."""
    contents = (getattr(message, "content", None) for message in messages)
    count = len(messages) + len(tools or ()) + sum(len(each) for each in contents if isinstance(each, list))
    if count > MAX_PARTS:
        raise FieldError(
            field,
            f"{field} must have at most {MAX_PARTS} messages, parts and tools, got {count}; join some",
        )


def sampling_of(services: Services, request: Any, *fields: str) -> dict[str, Any]:
    """Return sampling parameters from the request and the model's defaults."""
    given: dict[str, Any] = {"temperature": 1.0, **services.files.sampling}
    given |= {field: value for field in fields if (value := getattr(request, field)) is not None}
    keep_likeliest(given)
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    prompt: Prompt
    params: SamplingParams
    use: ToolUse
    services: Services
    prompt_ids: list[int] | None = None

    def reader(self) -> AnswerReader:
        return self.use.reader(self.services.handler.engine.tokenizer, self.prompt_ids)


def content_of(parts: Sequence[str], are_pictures: Sequence[bool]) -> str | list[dict[str, Any]]:
    """Join text parts; keep a list of parts if any part is an image."""
    if not any(are_pictures):
        return "\n".join(parts)
    return [
        {"type": "image_url", "image_url": part} if is_picture else {"type": "text", "text": part}
        for part, is_picture in zip(parts, are_pictures, strict=True)
    ]


def _joined(contents: Sequence[Any]) -> Any:
    found: list[Any] = []
    for are_texts, group in groupby(contents, lambda each: isinstance(each, str)):
        if are_texts:
            found.append({"type": "text", "text": "\n\n".join(group)})
        else:
            found += chain.from_iterable(group)
    return found if any(not isinstance(each, str) for each in contents) else found[0]["text"]


def one_system_message(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge messages of one role; system messages after the start become user text."""
    found: list[tuple[dict[str, Any], list[Any]]] = []
    is_begun = False
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "system" and is_begun:
            role, content = "user", f"<system-reminder>\n{content}\n</system-reminder>"
        is_begun = is_begun or role != "system"
        if role == "tool" or not found or found[-1][0]["role"] != role:
            found.append(({**message, "role": role}, [content]))
            continue
        last, contents = found[-1]
        contents.append(content)
        joins: dict[str, Any] = {"tool_calls": [], "reasoning_content": "\n\n"}
        for name, between in joins.items():
            if more := message.get(name):
                last[name] = last[name] + between + more if last.get(name) else more
    for message, contents in found:
        given = list(filter(None, contents)) or [""]
        message["content"] = given[0] if len(given) == 1 else _joined(given)
    return [message for message, _ in found]


async def prepare_turn(
    services: Services,
    chat: ChatPrompt,
    params: SamplingParams,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    choice: str | Mapping[str, Any] | None = None,
    is_parallel: bool = True,
    encode: Callable[[Prompt], Awaitable[Prompt]] | None = None,
) -> Turn:
    """Build the turn of a conversation. Raises InvalidRequest, RequestTooLong or Overloaded."""
    engine = services.handler.engine
    tokenizer = engine.tokenizer
    use = tool_use(tokenizer, tools, choice, params, is_parallel=is_parallel)
    reasoning = tokenizer.chat_format.reasoning
    if use.form is not None or reasoning is not None:
        params = replace(use.applied(params), skip_special_tokens=False)
    chat = replace(chat, tools=use.shown or None)
    prompt: Prompt = chat if encode is None else await encode(chat)
    if reasoning is None:
        return Turn(prompt=prompt, params=params, use=use, services=services)
    prepared = await engine.prepare(prompt)
    return Turn(prompt=prepared, params=params, use=use, services=services, prompt_ids=prepared.ids)


@dataclass(slots=True)
class Block:
    index: int
    kind: Kind
    text: str = ""
    name: str = ""
    call_id: str = ""
    is_complete: bool = False


Step: TypeAlias = tuple[Literal["start", "delta", "stop"], Block, str]


@dataclass(slots=True)
class Blocks:
    all: list[Block] = field(default_factory=list)
    _open: Block | None = None

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" and block.is_complete for block in self.all)

    @property
    def shown(self) -> list[Block]:
        """Return all blocks except malformed or incomplete calls."""
        return [block for block in self.all if block.kind != "call" or block.is_complete]

    def add(self, events: Iterable[Event]) -> list[Step]:
        """Add parser events and return the changed blocks."""
        steps: list[Step] = []
        for event in events:
            match event:
                case ReasoningText(text):
                    steps += self._append("reasoning", text)
                case ContentText(text) | CallMalformed(text, _):
                    steps += self._append("text", text)
                case CallBegin(_, call_id, name):
                    steps += self.end()
                    steps.append(self._start("call", name=name, call_id=call_id))
                case CallArguments(_, text):
                    steps += self._append("call", text)
                case CallEnd():
                    assert self._open is not None
                    self._open.is_complete = True
                    steps += self.end()
        return steps

    def end(self) -> list[Step]:
        if (block := self._open) is None:
            return []
        block.is_complete = block.is_complete or block.kind != "call"
        self._open = None
        return [("stop", block, "")]

    def _append(self, kind: Kind, text: str) -> list[Step]:
        steps: list[Step] = []
        if self._open is None or self._open.kind != kind:
            steps += self.end()
            steps.append(self._start(kind))
        assert self._open is not None
        self._open.text += text
        steps.append(("delta", self._open, text))
        return steps

    def _start(self, kind: Kind, *, name: str = "", call_id: str = "") -> Step:
        self._open = Block(len(self.all), kind, name=name, call_id=call_id)
        self.all.append(self._open)
        return "start", self._open, ""


class TurnAnswer(ABC):
    def __init__(self, turn: Turn, prefix: str, name: str) -> None:
        self.turn, self.name, self.id = turn, name, new_id(prefix)
        self.blocks, self.usage = Blocks(), Usage()
        self.last: Delta | None = None

    async def write(self, exchange: Exchange, request: Any) -> None:
        """Send the response, at once or as a stream of events."""
        turn, reader, stream = self.turn, self.turn.reader(), bool(request.stream)
        exchange.request_id = exchange.request_id or self.id
        async with aclosing(run(turn.services, exchange, request, [turn.prompt], turn.params)) as deltas:
            async for _, delta in deltas:
                self.usage.add(0, delta)
                events = reader.add(delta.text)
                if delta.finish_reason is not None:
                    self.last = delta
                    events += reader.finish(was_cut=self.was_cut)
                steps = self.blocks.add(events)
                if delta.finish_reason is not None:
                    steps += self.blocks.end()
                if not stream:
                    continue
                if not exchange.is_started:
                    await exchange.start_events()
                    await _send(exchange, self._first())
                for step in steps:
                    await _send(exchange, self._events(step))
        if stream:
            await _send(exchange, self._last())
            await exchange.end_events(b"")
        else:
            await exchange.answer(self._whole())

    @property
    def was_cut(self) -> bool:
        """Whether the output ended at a length limit."""
        return self.last is not None and self.last.finish_reason is FinishReason.LENGTH

    @abstractmethod
    def _whole(self) -> dict[str, Any]: ...

    @abstractmethod
    def _first(self) -> Iterator[dict[str, Any]]: ...

    @abstractmethod
    def _events(self, step: Step) -> Iterator[dict[str, Any]]: ...

    @abstractmethod
    def _last(self) -> Iterator[dict[str, Any]]: ...


async def _send(exchange: Exchange, events: Iterable[dict[str, Any]]) -> None:
    for event in events:
        await exchange.event(event, name=event["type"])
