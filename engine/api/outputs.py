"""Outputs of the engine: increments while a request runs, whole outputs after."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class FinishReason(enum.StrEnum):
    """Reason for which a sample ended."""

    STOP = "stop"  # a stop string, a stop id or the model's end token
    LENGTH = "length"  # max_tokens, or the model's length
    ABORT = "abort"  # the caller gave up
    ERROR = "error"  # this request failed; see the message


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of the chosen token, after penalties and bias and before
    temperature and truncation, and of the likeliest ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities (natural) of a prompt's tokens, each after those before
    them. The first token has none: nothing comes before it."""

    first_id: int
    rest: tuple[TokenLogprob, ...]


@dataclass(slots=True, kw_only=True)
class Delta:
    """New tokens and text of one sample of one request; the last one has a finish reason.

    Nobody changes one that was handed out. It is not frozen because one is made for every token,
    and freezing triples the time that takes.

    index           which of the request's n samples
    token_ids       new tokens, stop and end tokens included
    text            new text; the stop string or end token is not part of it
    stop_match      the stop string or stop id that ended it
    error           the message when finish_reason is ERROR
    prompt_logprobs with the first token of each sample, when asked for
    embedding       likewise: hidden states of the prompt, pooled, neither normalized nor cut
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    embedding: tuple[float, ...] | None = None


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """A call of a tool. ``arguments``: JSON, as far as the model has written it; ``is_whole``: to its end."""

    call_id: str
    name: str
    arguments: str = ""
    is_whole: bool = False


@dataclass(slots=True, kw_only=True)
class ChatAnswer:
    """A sample of a chat, in its parts."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Completion:
    """Finished sample; ``error`` says why when its finish_reason is ERROR. ``answer``: of a chat, the
    text in its parts."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    answer: ChatAnswer | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """Finished request: its samples in order of index, and its timing in seconds."""

    request_id: str
    outputs: list[Completion]
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    latency_s: float
    prompt_logprobs: PromptLogprobs | None = None
    embedding: tuple[float, ...] | None = None
