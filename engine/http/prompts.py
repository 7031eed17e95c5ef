from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from ..api.prompt import ChatPrompt, Message, Prompt
from .endpoint import Services
from .errors import FieldError
from .exchange import Exchange

Side: TypeAlias = Literal["left", "right"]
TEXT_LENGTHS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCut:
    most: int | None = None
    side: Side = "left"
    special: bool = True

    async def encoded(self, services: Services, exchange: Exchange, prompt: Prompt) -> Prompt:
        if self.most is None and (self.special or not isinstance(prompt, str)):
            return prompt
        handler = services.handler
        tokenizer, longest = handler.engine.tokenizer, TEXT_LENGTHS * handler.engine.info.max_model_len
        encode: Callable[..., list[int]]
        if isinstance(prompt, str):
            encode = functools.partial(tokenizer.encode, prompt, add_special_tokens=self.special)
        elif isinstance(prompt, ChatPrompt):
            if any(map(_has_picture, prompt.messages)):
                raise FieldError(
                    "truncate_prompt_tokens",
                    f"truncate_prompt_tokens must be left out for prompts with images, got {self.most}; send "
                    "fewer messages",
                )
            encode = functools.partial(tokenizer.apply_chat_template, prompt)
        else:
            return self._kept(cast(Sequence[Any], prompt))
        tenant = handler.tenant(exchange)
        return self._kept(await handler.texts.run(tenant, functools.partial(encode, max_tokens=longest)))

    def _kept(self, ids: Sequence[Any]) -> list[Any]:
        if self.most is None or len(ids) <= self.most:
            return list(ids)
        return list(ids[: self.most] if self.side == "right" else ids[-self.most :])


def _has_picture(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type") == "image_url" for part in content)


def prompt_cut(
    services: Services,
    most: int | None,
    side: Side | None,
    *,
    max_tokens: int = 1,
    default_side: Side = "left",
    special: bool = True,
) -> PromptCut:
    """Return the request's truncation. Raises FieldError for an invalid number."""
    if most == -1:
        longest = services.handler.engine.info.max_model_len
        most = max(longest - (max_tokens if max_tokens < longest else 1), 1)
    if most is not None and most < 1:
        raise FieldError(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens must be -1 or at least 1, got {most}; leave it out to keep all",
        )
    return PromptCut(most=most, side=side or default_side, special=special)
