"""How one request wants its tokens drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from .errors import InvalidRequest
from .structured_output import Structured

Speculate = Literal["off", "ngram", "suffix"]
Pooling = Literal["last", "mean"]
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_SAMPLES = 64
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it, and must stay finite in float32
_FLOAT32_EPSILON = 2.0**-23  # 0.01 comes over the wire as a float32, which is less


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Names, ranges and meanings are those of vLLM and the OpenAI API.

    max_tokens           tokens to generate at most (None: up to the model's length)
    min_tokens           tokens to generate before anything but max_tokens may end the output
    temperature          0 is greedy
    top_k                keep the k likeliest tokens (0: all)
    top_p                keep the smallest set whose probability reaches p (1: all)
    min_p                drop tokens less likely than min_p times the likeliest (0: none)
    repetition_penalty   divides positive logits of tokens seen in prompt or output, and
                         multiplies negative ones (1: none; Keskar et al. 2019)
    presence_penalty     subtracted once from logits of tokens in the output
    frequency_penalty    subtracted per occurrence in the output
    logit_bias           token id -> number added to its logit
    seed                 makes the draw reproducible whatever else is in the batch
    n                    independent samples of the same prompt
    stop                 strings that end the output; not part of it
    stop_ids             token ids that end the output, beside the model's own end tokens
    ignore_eos           go on after the model's end tokens
    logprobs             None: none; k: the chosen token's and the k likeliest tokens'
    prompt_logprobs      the same for each token of the prompt but the first, by the model alone; such a
                         prompt is computed whole, whatever of it the prefix cache has
    quantize_after       tokens up to which a sequence is read in 16 bits alone, where the engine has 16-bit
                         pages beside quantized ones (None: the engine's number). Requests share cached
                         pages with those of the same number only
    speculate            what guesses the next tokens, which changes nothing but the time they take: "off",
                         "ngram" or "suffix" (None: as the engine was started)
    pooling              ask for the prompt's embedding too: its last token's hidden state, or the mean of
                         all (None: none). For the mean a prompt is computed whole, as for prompt_logprobs
    target_itl           milliseconds between two tokens that this request asks for: the server cuts
                         prompts of others to the tightest target of those who decode, its own included
                         (None: the server's alone)
    target_ttft          milliseconds within which the first token is wanted: a server that refuses late
                         requests refuses this one at once if its first token is expected later (None: any)
    structured           what the output must look like (None: anything). It wins over min_tokens and
                         ignore_eos: an output that is complete ends
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    quantize_after: int | None = None
    speculate: Speculate | None = None
    pooling: Pooling | None = None
    target_itl: float | None = None
    target_ttft: float | None = None
    structured: Structured | None = None

    def __post_init__(self) -> None:
        """Raise InvalidRequest naming the first value that is out of its range."""
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, math.inf)
        _within("min_tokens", self.min_tokens, 0, math.inf)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        _within("temperature", self.temperature, 0, 100)
        _within("top_k", self.top_k, 0, math.inf)
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p must be above 0 and at most 1, got {self.top_p}; 1 keeps all tokens")
        _within("min_p", self.min_p, 0, 1)
        if not MIN_REPETITION_PENALTY * (1 - _FLOAT32_EPSILON) <= self.repetition_penalty <= 100:
            raise InvalidRequest(
                f"repetition_penalty must be between {MIN_REPETITION_PENALTY} and 100, got "
                f"{self.repetition_penalty}; 1 is none"
            )
        _within("presence_penalty", self.presence_penalty, -2, 2)
        _within("frequency_penalty", self.frequency_penalty, -2, 2)
        for token, bias in self.logit_bias.items():
            _within(f"logit_bias of token {token}", bias, -100, 100)
        if self.seed is not None:
            _within("seed", self.seed, 0, 2**64 - 1)
        if self.quantize_after is not None:
            _within("quantize_after", self.quantize_after, 0, 2**31 - 1)
        _within("n", self.n, 1, MAX_SAMPLES)
        for name, target in (("target_itl", self.target_itl), ("target_ttft", self.target_ttft)):
            if target is not None and not 0 < target < math.inf:
                raise InvalidRequest(
                    f"{name} must be above 0 milliseconds, got {target}; leave it out for none"
                )
        if self.speculate is not None and self.speculate not in get_args(Speculate):
            raise InvalidRequest(
                f"speculate must be one of {', '.join(get_args(Speculate))}, got {self.speculate!r}"
            )
        if self.pooling is not None and self.pooling not in get_args(Pooling):
            raise InvalidRequest(
                f"pooling must be one of {', '.join(get_args(Pooling))}, got {self.pooling!r}"
            )
        self._check_stop()
        for name, number in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if number is not None:
                _within(name, number, 0, MAX_LOGPROBS)

    def _check_stop(self) -> None:
        if isinstance(self.stop, str):  # would be read as one stop string per letter
            raise InvalidRequest(
                f"stop must be a tuple of strings, got {self.stop!r}; write ({self.stop!r},)"
            )
        _within("number of stop strings", len(self.stop), 0, MAX_STOPS)
        if "" in self.stop:
            raise InvalidRequest("stop must not contain the empty string: it would end every output at once")
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_LENGTH:
            raise InvalidRequest(f"a stop string must be at most {MAX_STOP_LENGTH} characters, got {longest}")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        rule = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {rule}, got {value}")
