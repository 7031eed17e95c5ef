"""Objects that several responses share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from .generation import Usage


class AnswerModel(BaseModel):
    """An object of a response. Unset fields are left out."""

    model_config = ConfigDict(protected_namespaces=(), defer_build=True)

    def json_bytes(self) -> bytes:
        return self.__pydantic_serializer__.to_json(self, exclude_unset=True)


class PromptTokensDetails(AnswerModel):
    """Parts of the prompt's tokens."""

    cached_tokens: int


class UsageInfo(AnswerModel):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


def usage_info(usage: Usage) -> UsageInfo:
    return UsageInfo(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )


PromptLogprobs = list[dict[str, dict[str, Any]] | None]
"""vLLM's format: a dict per prompt token, from token id to ``logprob``, ``rank`` and ``decoded_token``."""
