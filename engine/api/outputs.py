from __future__ import annotations

import enum
from dataclasses import dataclass, field


class FinishReason(enum.StrEnum):
    """Why a sample ended."""

    STOP = "stop"  # a stop string, a stop id or the model's end token
    LENGTH = "length"  # max_tokens, or the model's length
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probabilities (natural logarithm) after penalties and bias, before temperature and truncation."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Natural logarithms of the prompt tokens' probabilities. The first token has none."""

    first_id: int
    rest: tuple[TokenLogprob, ...]


@dataclass(slots=True, kw_only=True)
class Delta:
    """New tokens and text of one sample. The last delta has a finish reason.

    index            index of the sample, from 0 to n - 1
    token_ids        new tokens, including stop and end tokens
    text             new text, without the stop string or end token
    stop_match       stop string or stop id that ended the sample
    error            message if finish_reason is ERROR
    prompt_logprobs  log probabilities of the prompt, in each sample's first delta
    embedding        pooled hidden state, in the first delta
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
    """A tool call. ``arguments`` is JSON text; it may be incomplete unless ``is_complete``."""

    call_id: str
    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass(slots=True, kw_only=True)
class ChatAnswer:
    """Chat output, split into reasoning, content and tool calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Completion:
    """A finished sample. ``error`` is set if the sample failed; ``answer`` is set for chats."""

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
    """A finished request: its samples, and its timing in seconds."""

    request_id: str
    outputs: list[Completion]
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    latency_s: float
    prompt_logprobs: PromptLogprobs | None = None
    embedding: tuple[float, ...] | None = None
