from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from ..api.errors import InvalidRequest
from ..api.sampling_params import SamplingParams, Speculate
from ..api.structured_output import StructuredOutput
from .errors import FieldError
from .prompts import Side
from .request_model import RequestModel, agreed, only

MAX_ITEMS = 4096  # entries of logit_bias, stop or stop_token_ids
_SAME_NAME = (
    "min_tokens", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "skip_special_tokens", "n", "ignore_eos", "prompt_logprobs", "speculate",
    "target_itl", "target_ttft", "include_stop_str_in_output",
)  # fmt: skip
_LISTS = {"stop_token_ids": "stop_ids", "bad_words": "bad_words", "allowed_token_ids": "allowed_token_ids"}
_CONSTRAINTS = {
    "guided_json": "json_schema", "json_schema": "json_schema", "guided_regex": "regex", "regex": "regex",
    "guided_grammar": "grammar", "ebnf": "grammar",
}  # fmt: skip


class JsonSchemaFormat(RequestModel):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """The field ``response_format``, including vLLM's structural_tag."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    fields_of: ClassVar = {
        "text": "", "json_object": "", "json_schema": "json_schema",
        "structural_tag": "structures triggers format",
    }  # fmt: skip
    allowed: ClassVar = {"type": tuple(fields_of)}

    def structured(self) -> StructuredOutput | None:
        match self.type:
            case "text":
                return None
            case "json_object":
                return StructuredOutput(json_object=True)
            case "json_schema":
                if self.json_schema is None or self.json_schema.schema_ is None:
                    raise FieldError(
                        "response_format.json_schema",
                        "response_format.json_schema must have a schema, got none; give one",
                    )
                return StructuredOutput(json_schema=self.json_schema.schema_)
            case _:
                return StructuredOutput(structural_tag=self.model_dump(exclude_none=True))


class StructuredOutputs(RequestModel):
    """vLLM's field ``structured_outputs``. Only one of its fields may be set."""

    json_: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None

    def structured(self) -> StructuredOutput:
        return StructuredOutput(
            json_schema=self.json_,
            regex=self.regex,
            choice=tuple(self.choice or ()),
            grammar=self.grammar,
            json_object=bool(self.json_object),
            structural_tag=self.structural_tag,
        )


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(RequestModel):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    session_id: str | None = None  # has no effect
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    max_reasoning_tokens: int | None = None
    thinking_token_budget: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    speculate: Speculate | None = None
    target_itl: float | None = None
    target_ttft: float | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    def check_served(self) -> None:
        only("best_of", self.best_of, (1 if self.n is None else self.n,), "best_of is not supported")
        only("use_beam_search", self.use_beam_search, (False,))
        only("length_penalty", self.length_penalty, (1.0,), "beams are not searched")
        only("spaces_between_special_tokens", self.spaces_between_special_tokens, (True, False))
        if self.stream_options is not None:
            only("stream_options.include_obfuscation", self.stream_options.include_obfuscation, (False,))
            if not self.stream:
                raise FieldError(
                    "stream_options", "stream_options must come with stream true, got none; leave it out"
                )

    def structured(self) -> StructuredOutput | None:
        """Return the constraint on the output. Raises InvalidRequest if several fields set one."""
        named: dict[str, StructuredOutput | None] = {}
        if self.response_format is not None:
            named["response_format"] = self.response_format.structured()
        if self.structured_outputs is not None:
            named["structured_outputs"] = self.structured_outputs.structured()
        for field, kind in _CONSTRAINTS.items():
            if (value := getattr(self, field)) is not None:
                named[field] = StructuredOutput(**{kind: value})
        if self.guided_choice is not None:
            named["guided_choice"] = StructuredOutput(choice=tuple(self.guided_choice))
        given = {name: value for name, value in named.items() if value is not None}
        if len(given) > 1:
            raise InvalidRequest(
                f"at most one field may constrain the output, got {' and '.join(given)}; give one"
            )
        return next(iter(given.values()), None)

    def sampling(
        self,
        defaults: dict[str, float],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        structured: StructuredOutput | None,
    ) -> SamplingParams:
        """Return the sampling parameters. ``defaults`` come from the model's files."""
        self.check_served()
        given: dict[str, Any] = {"temperature": 1.0, **defaults}
        given |= {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        keep_likeliest(given)
        if self.top_k is not None:
            given["top_k"] = 0 if self.top_k == -1 else self.top_k
        if self.seed is not None:
            given["seed"] = self.seed % 2**64  # seeds are signed in OpenAI's and vLLM's APIs
        if self.logit_bias is not None:
            _check_count("logit_bias", self.logit_bias)
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise FieldError(
                "allowed_token_ids",
                "allowed_token_ids must have at least one id, got none; leave it out for all",
            )
        budget = agreed(self, "thinking_token_budget", "max_reasoning_tokens")
        given["max_reasoning_tokens"] = None if self.thinking_token_budget == -1 else budget
        if self.stop is not None:
            _check_count("stop", self.stop if isinstance(self.stop, list) else ())
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        _check_count("stop_token_ids", self.stop_token_ids or ())
        for field, name in _LISTS.items():
            if (items := getattr(self, field)) is not None:
                given[name] = tuple(items)
        return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs, structured=structured)


def keep_likeliest(given: dict[str, Any]) -> None:
    if given.get("top_p") == 0:
        given["top_p"] = 2.0**-30


def _check_count(name: str, items: Collection[object]) -> None:
    if len(items) > MAX_ITEMS:
        raise FieldError(name, f"{name} must have at most {MAX_ITEMS} items, got {len(items)}; drop some")


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise FieldError(
            "logit_bias", f"logit_bias must have token ids as keys, got {text!r:.60}; use numbers"
        )
    return int(text)
