"""Requests and answers of /v1/completions."""

from __future__ import annotations

from typing import Literal

from .answer_models import AnswerModel, UsageInfo
from .logprobs import CompletionLogprobs
from .request_model import only
from .sampling import SamplingFields

PromptField = str | list[int] | list[str] | list[list[int]]


class CompletionRequest(SamplingFields):
    """A request of /v1/completions."""

    prompt: PromptField
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def check_served(self) -> None:
        super().check_served()
        only("suffix", self.suffix, (), "text is not filled in before a suffix")


class CompletionChoice(AnswerModel):
    """A sample; in a stream, its new part. ``stop_reason`` and the last three fields are vLLM's."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None
    token_ids: list[int]
    prompt_token_ids: list[int]
    prompt_logprobs: None  # inserted as JSON, see AnswerModel.json_bytes


class Completion(AnswerModel):
    """A response, or an event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None
