from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .errors import InvalidRequest
from .setting import Parameter, parameter, settings_of, take_settings
from .structured_output import StructuredOutput

Speculate = Literal["off", "ngram", "suffix"]
Pooling = Literal["last", "mean"]
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 128
MAX_SAMPLES = 64
MIN_REPETITION_PENALTY = 0.01  # logits are divided by the penalty and must stay finite in float32
_FLOAT32_EPSILON = 2.0**-23


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, with the names and ranges of vLLM and the OpenAI API.

    Each parameter is declared once, with its default, type, range and help text.
    """

    max_tokens: int | None = parameter(
        None, "maximum number of output tokens", shown="up to the model's length", kind="int", metavar="N",
        low=1,
    )  # fmt: skip
    min_tokens: int = parameter(
        0, "minimum number of tokens to generate; until then only max_tokens can end the output", kind="int",
        metavar="N", low=0,
    )  # fmt: skip
    temperature: float = parameter(
        0.0, "sampling temperature; 0 is greedy", kind="float", metavar="T", low=0, high=100,
        recommended=True,
    )  # fmt: skip
    top_k: int = parameter(
        0, "keep the K likeliest tokens; 0 keeps all", kind="int", metavar="K", low=0, recommended=True
    )
    top_p: float = parameter(
        1.0, "keep the smallest set of tokens whose probability reaches P; 1 keeps all", kind="float",
        metavar="P", low=0, above=True, high=1, remedy="1 keeps all tokens", recommended=True,
    )  # fmt: skip
    min_p: float = parameter(
        0.0, "drop tokens less likely than P times the likeliest", kind="float", metavar="P", low=0, high=1,
        recommended=True,
    )  # fmt: skip
    repetition_penalty: float = parameter(
        1.0, "factor that divides positive logits and multiplies negative logits of tokens in prompt or "
        "output", kind="float", metavar="X", low=MIN_REPETITION_PENALTY * (1 - _FLOAT32_EPSILON), high=100,
        remedy="1 applies no penalty", more="Keskar et al. 2019.", recommended=True,
    )  # fmt: skip
    presence_penalty: float = parameter(
        0.0, "amount subtracted once from logits of output tokens", kind="float", metavar="X", low=-2, high=2,
    )  # fmt: skip
    frequency_penalty: float = parameter(
        0.0, "amount subtracted from a logit per occurrence in the output", kind="float", metavar="X",
        low=-2, high=2,
    )  # fmt: skip
    logit_bias: Mapping[int, float] = parameter(
        {}, "number X added to the logit of token ID; repeatable", shown="none", kind="biases",
        metavar="ID=X",
    )  # fmt: skip
    seed: int | None = parameter(
        None, "seed of random numbers; with a seed, the output does not depend on other requests in the "
        "batch", shown="random", kind="int", metavar="N", low=0, high=2**64 - 1,
    )  # fmt: skip
    n: int = parameter(
        1, "number of independent outputs for the prompt", kind="int", metavar="N", low=1, high=MAX_SAMPLES
    )
    stop: tuple[str, ...] = parameter(
        (), "string that ends the output and is left out of it; repeatable", shown="none", kind="texts",
        metavar="S",
    )  # fmt: skip
    stop_ids: tuple[int, ...] = parameter(
        (), "token id that ends the output, in addition to the model's end tokens; repeatable", shown="none",
        kind="ints", metavar="N", flag="--stop-id", vllm="stop_token_ids",
    )  # fmt: skip
    include_stop_str_in_output: bool = parameter(
        False, "keep the stop string or stop token in the text if it ends the output", shown="",
        kind="switch", flag="--include-stop",
    )  # fmt: skip
    bad_words: tuple[str, ...] = parameter(
        (), "text that must not be generated, with or without a leading space; repeatable", shown="none",
        kind="texts", metavar="S", flag="--bad-word", more="As in vLLM, only the usual tokenization of the "
        "text is forbidden; other tokens may still spell the text.",
    )  # fmt: skip
    allowed_token_ids: tuple[int, ...] = parameter(
        (), "token id that may be generated; all ids that are not listed are forbidden; repeatable",
        shown="all", kind="ints", metavar="N", flag="--allowed-id", more="List the end tokens, too, because "
        "without an end token the output runs until max_tokens.",
    )  # fmt: skip
    num_output_tokens: int = parameter(
        0, "number of tokens at the prompt's end that an earlier part of the request has generated",
        kind="int", low=0, flag="", more="All parameters describe the whole request: max_tokens, min_tokens, "
        "penalties and random numbers count these tokens as output. With a seed, the output continues as if "
        "the request had not been split.",
    )  # fmt: skip
    ignore_eos: bool = parameter(False, "continue after the model's end tokens", shown="", kind="switch")
    skip_special_tokens: bool = parameter(
        True, "leave special tokens out of the text; a token that ends the output is always left out",
        shown="yes", kind="switch", flag="",
    )  # fmt: skip
    max_reasoning_tokens: int | None = parameter(
        None, "maximum number of reasoning tokens before the answer must begin, for reasoning models",
        shown="no limit", kind="int", metavar="N", low=0, remedy="0 makes the model answer at once",
    )  # fmt: skip
    logprobs: int | None = parameter(
        None, "return log probabilities of each output token and of the K likeliest at its position",
        shown="none", kind="int", metavar="K", low=0, high=MAX_LOGPROBS,
    )  # fmt: skip
    prompt_logprobs: int | None = parameter(
        None, "return log probabilities of each prompt token and of the K likeliest at its position",
        shown="none", kind="int", metavar="K", low=0, high=MAX_LOGPROBS,
        more="The whole prompt is computed, even if the prefix cache has a part of it.",
    )  # fmt: skip
    speculate: Speculate | None = parameter(
        None, "source of draft tokens, which affects speed but not the output",
        shown="the engine's setting", choices=get_args(Speculate),
    )  # fmt: skip
    pooling: Pooling | None = parameter(
        None, "also return the prompt's embedding: the hidden state of the last token, or the mean over all "
        "tokens", shown="none", choices=get_args(Pooling), flag="",
        more="With mean, the whole prompt is computed, even if the prefix cache has a part of it.",
    )  # fmt: skip
    target_itl: float | None = parameter(
        None, "target inter-token latency of this request, in milliseconds", shown="the engine's",
        kind="float", metavar="MS", low=0, above=True, remedy="leave it out for the engine's target",
        more="While this request decodes, prefill chunks are sized for the tightest target of all decoding "
        "requests and the engine.",
    )  # fmt: skip
    target_ttft: float | None = parameter(
        None, "target time to first token, in milliseconds", shown="none",
        kind="float", metavar="MS", low=0, above=True, remedy="leave it out for no target",
        more="A request that can no longer meet its target yields to requests that can.",
    )  # fmt: skip
    structured_from_first_token: bool = parameter(
        False, "apply the schema or grammar from the first token on, not only after the reasoning", shown="",
        kind="switch", flag="", vllm="grammar_from_first_token",
    )  # fmt: skip
    structured: StructuredOutput | None = parameter(
        None, "schema, grammar, pattern or choices that the output must match", shown="anything",
        kind="structured", flag="", more="An output that matches completely ends, even if min_tokens is not "
        "reached or ignore_eos is set.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        take_settings(self, InvalidRequest)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if self.max_tokens is not None and self.num_output_tokens >= self.max_tokens:
            raise InvalidRequest(
                f"num_output_tokens must be less than max_tokens ({self.max_tokens}), got "
                f"{self.num_output_tokens}; send the max_tokens of the whole request"
            )
        for token, bias in self.logit_bias.items():
            _within(f"logit_bias of token {token}", bias, -100, 100)
        self._check_stop()

    def _check_stop(self) -> None:
        _within("number of stop strings", len(self.stop), 0, MAX_STOPS)
        _within("number of bad_words", len(self.bad_words), 0, MAX_BAD_WORDS)
        if "" in self.stop:
            raise InvalidRequest(
                "stop must not contain the empty string, which would end every output at once; remove it"
            )
        if not all(map(str.strip, self.bad_words)):
            raise InvalidRequest("bad_words must not contain a text of spaces only; remove it")
        for what, texts, most in (
            ("a stop string", self.stop, MAX_STOP_LENGTH),
            ("a bad word", self.bad_words, MAX_BAD_WORD_LENGTH),
        ):
            if (longest := max(map(len, texts), default=0)) > most:
                raise InvalidRequest(f"{what} must be at most {most} characters, got {longest}")


PARAMETERS: Mapping[str, tuple[Parameter, Any]] = settings_of(SamplingParams)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}")
