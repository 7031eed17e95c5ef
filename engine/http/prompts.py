from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from ..api.prompt import ChatPrompt, Prompt
from ..grpc.tokenization import tokenize
from ..vision.messages import has_pictures
from .endpoint import Services
from .errors import FieldError
from .exchange import Exchange

Side: TypeAlias = Literal["left", "right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCut:
    most: int | None = None
    side: Side = "left"
    special: bool = True

    async def encoded(self, services: Services, exchange: Exchange, prompt: Prompt) -> Prompt:
        if self.most is None and (self.special or not isinstance(prompt, str)):
            return prompt
        if not isinstance(prompt, str | ChatPrompt):
            return self._kept(cast(Sequence[Any], prompt))
        if isinstance(prompt, ChatPrompt) and has_pictures(prompt.messages):
            raise FieldError(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens must be left out for prompts with images, got {self.most}; send "
                "fewer messages",
            )
        ids = await tokenize(services.handler, prompt, exchange, add_special_tokens=self.special)
        return self._kept(ids)

    def _kept(self, ids: Sequence[Any]) -> list[Any]:
        if self.most is None or len(ids) <= self.most:
            return list(ids)
        return list(ids[: self.most] if self.side == "right" else ids[-self.most :])


def prompt_cut(
    services: Services, request: Any, *, max_tokens: int = 1, default_side: Side = "left"
) -> PromptCut:
    """Return the request's truncation. Raises FieldError for an invalid number."""
    most = request.truncate_prompt_tokens
    if most == -1:
        longest = services.handler.engine.info.max_model_len
        most = max(longest - (max_tokens if max_tokens < longest else 1), 1)
    if most is not None and most < 1:
        raise FieldError(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens must be -1 or at least 1, got {most}; leave it out to keep all",
        )
    side, special = request.truncation_side or default_side, request.add_special_tokens is not False
    return PromptCut(most=most, side=side, special=special)
