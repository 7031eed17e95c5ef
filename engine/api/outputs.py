"""Outputs of the engine: deltas while a request runs, and whole outputs."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class FinishReason(enum.StrEnum):
    """Reason for which a sample ended."""

    STOP = "stop"  # a stop string, a stop id or the model's end token
    LENGTH = "length"  # max_tokens, or the model's length
    ABORT = "abort"  # the caller aborted the request
    ERROR = "error"  # this request failed; see the message


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms of the probabilities of the chosen token and of the likeliest tokens, after
    penalties and bias, but before temperature and truncation."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Natural logarithms of the probabilities of a prompt's tokens, each given the tokens before it. The
    first token has none."""

    first_id: int
    rest: tuple[TokenLogprob, ...]


@dataclass(slots=True, kw_only=True)
class Delta:
    """New tokens and text of one sample; its last delta has a finish reason.

    Treat a delta as immutable. It is not a frozen dataclass, because one is built for every token and
    freezing triples the time.

    index           index of the sample, from 0 to n - 1
    token_ids       new tokens, including stop and end tokens
    text            new text, without the stop string or end token
    stop_match      stop string or stop id that ended the sample
    error           message if finish_reason is ERROR
    prompt_logprobs log probabilities of the prompt, if requested; they come with each sample's first token
    embedding       pooled hidden state as computed, if requested; it comes with the first token
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
    """A tool call. ``arguments``: JSON, as far as the model has written it; ``is_whole``: whether it is
    complete."""

    call_id: str
    name: str
    arguments: str = ""
    is_whole: bool = False


@dataclass(slots=True, kw_only=True)
class ChatAnswer:
    """A sample of a chat, split into its parts."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Completion:
    """Finished sample. ``error`` has the reason if finish_reason is ERROR; ``answer`` has the parts of a
    chat."""

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
