"""Objects that several responses share."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from .generation import Usage


class AnswerModel(BaseModel):
    """An object of a response. Unset fields are left out."""

    model_config = ConfigDict(protected_namespaces=(), defer_build=True)

    def json_bytes(self, **parts: bytes | None) -> bytes:
        """Return the object as JSON. ``parts``: values of fields that are null or an empty list here, as
        JSON. Long lists are passed as JSON, because pydantic's objects take ten times the memory, and
        pydantic does not release the interpreter lock while it writes them."""
        data = self.__pydantic_serializer__.to_json(self, exclude_unset=True)
        for name, value in parts.items():
            if value is not None:  # within a text the quotes would be escaped
                before, key, after = data.partition(f'"{name}":'.encode())
                empty = b"[]" if after.startswith(b"[]") else b"null"
                assert after.startswith(empty), f"{name} must be empty"
                data = b"".join((before, key, value, after[len(empty) :]))
        return data


def json_list(items: Iterable[bytes]) -> bytes:
    """Return a list of objects that are JSON already."""
    return b"[%b]" % b",".join(items)


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
