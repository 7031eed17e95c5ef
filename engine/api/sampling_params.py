"""Sampling parameters of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from .errors import InvalidRequest
from .setting import Parameter, parameter, settings_of, take_settings
from .structured_output import StructuredOutput

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

    Each is declared once: default, type, range and help. The checks, the fields of both gRPC services, the
    options of ``octavo generate`` and the reference follow from that (``setting.py``).
    """

    max_tokens: int | None = parameter(
        None, "tokens to generate at most", shown="up to the model's length", kind="int", metavar="N", low=1
    )
    min_tokens: int = parameter(
        0, "tokens to generate before anything but max_tokens may end the output",
        kind="int", metavar="N", low=0,
    )  # fmt: skip
    temperature: float = parameter(
        0.0, "0 is greedy", kind="float", metavar="T", low=0, high=100, recommended=True
    )
    top_k: int = parameter(
        0, "keep the K likeliest tokens; 0 keeps all", kind="int", metavar="K", low=0, recommended=True
    )
    top_p: float = parameter(
        1.0, "keep the smallest set of tokens whose probability reaches P; 1 keeps all",
        kind="float", metavar="P", low=0, above=True, high=1, remedy="1 keeps all tokens", recommended=True,
    )  # fmt: skip
    min_p: float = parameter(
        0.0, "drop tokens less likely than P times the likeliest", kind="float", metavar="P", low=0, high=1,
        recommended=True,
    )  # fmt: skip
    repetition_penalty: float = parameter(
        1.0, "divides positive logits of tokens seen in prompt or output, and multiplies negative ones",
        kind="float", metavar="X", low=MIN_REPETITION_PENALTY * (1 - _FLOAT32_EPSILON), high=100,
        remedy="1 is none", more="Keskar et al. 2019.", recommended=True,
    )  # fmt: skip
    presence_penalty: float = parameter(
        0.0, "subtracted once from logits of tokens in the output", kind="float", metavar="X", low=-2, high=2
    )
    frequency_penalty: float = parameter(
        0.0, "subtracted per occurrence in the output", kind="float", metavar="X", low=-2, high=2
    )
    logit_bias: Mapping[int, float] = parameter(
        MappingProxyType({}), "number added to the logit of a token id; repeatable", shown="none",
        kind="biases", metavar="ID=X",
    )  # fmt: skip
    seed: int | None = parameter(
        None, "make the draw reproducible, whatever else is in the batch", shown="random",
        kind="int", metavar="N", low=0, high=2**64 - 1,
    )  # fmt: skip
    n: int = parameter(
        1, "independent samples of the same prompt", kind="int", metavar="N", low=1, high=MAX_SAMPLES
    )
    stop: tuple[str, ...] = parameter(
        (), "string that ends the output, and is not part of it; repeatable", shown="none",
        kind="texts", metavar="S",
    )  # fmt: skip
    stop_ids: tuple[int, ...] = parameter(
        (), "token id that ends the output, beside the model's own end tokens; repeatable", shown="none",
        kind="ints", metavar="N", flag="--stop-id", vllm="stop_token_ids",
    )  # fmt: skip
    ignore_eos: bool = parameter(False, "go on after the model's end tokens", shown="", kind="switch")
    skip_special_tokens: bool = parameter(
        True, "leave special tokens out of the text; those that end the output never are in it", shown="yes",
        kind="switch", flag="",
    )  # fmt: skip
    max_reasoning_tokens: int | None = parameter(
        None, "tokens of reasoning, after which the model must answer; for models that think",
        shown="any number", kind="int", metavar="N", low=0, remedy="0 asks for an answer at once",
    )  # fmt: skip
    logprobs: int | None = parameter(
        None, "log probabilities of the chosen tokens and of the K likeliest", shown="none",
        kind="int", metavar="K", low=0, high=MAX_LOGPROBS,
    )  # fmt: skip
    prompt_logprobs: int | None = parameter(
        None, "log probabilities of the prompt's tokens and of the K likeliest at each", shown="none",
        kind="int", metavar="K", low=0, high=MAX_LOGPROBS,
        more="Such a prompt is computed whole, whatever of it the prefix cache has.",
    )  # fmt: skip
    speculate: Speculate | None = parameter(
        None, "what guesses the next tokens, which changes nothing but the time they take",
        shown="as the engine was started", choices=get_args(Speculate),
    )  # fmt: skip
    pooling: Pooling | None = parameter(
        None, "ask for the prompt's embedding too: its last token's hidden state, or the mean of all",
        shown="none", choices=get_args(Pooling), flag="",
        more="For the mean a prompt is computed whole, as for prompt_logprobs.",
    )  # fmt: skip
    target_itl: float | None = parameter(
        None, "milliseconds between two tokens that this request asks for", shown="the engine's alone",
        kind="float", metavar="MS", low=0, above=True, remedy="leave it out for none",
        more="The scheduler cuts prompts of others to the tightest target of those who decode, its own "
        "included.",
    )  # fmt: skip
    target_ttft: float | None = parameter(
        None, "milliseconds within which the first token is wanted", shown="any",
        kind="float", metavar="MS", low=0, above=True, remedy="leave it out for none",
        more="A server that refuses late requests refuses this one at once if it expects its first token "
        "later.",
    )  # fmt: skip
    structured_from_first_token: bool = parameter(
        False, "apply the schema or grammar to the first token already, not only behind the reasoning",
        shown="", kind="switch", flag="", vllm="grammar_from_first_token",
    )  # fmt: skip
    structured: StructuredOutput | None = parameter(
        None, "what the output must look like", shown="anything", kind="structured", flag="",
        more="It wins over min_tokens and ignore_eos: an output that is complete ends.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Raise InvalidRequest naming the first value that is out of its range."""
        take_settings(self, InvalidRequest)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        for token, bias in self.logit_bias.items():
            _within(f"logit_bias of token {token}", bias, -100, 100)
        self._check_stop()

    def _check_stop(self) -> None:
        _within("number of stop strings", len(self.stop), 0, MAX_STOPS)
        if "" in self.stop:
            raise InvalidRequest("stop must not contain the empty string: it would end every output at once")
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_LENGTH:
            raise InvalidRequest(f"a stop string must be at most {MAX_STOP_LENGTH} characters, got {longest}")


PARAMETERS: Mapping[str, tuple[Parameter, Any]] = settings_of(SamplingParams)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}")
