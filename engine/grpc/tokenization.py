"""Conversion between text and token ids for clients, on threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ..api.errors import InvalidRequest, RequestTooLong
from ..api.prompt import ChatPrompt
from ..vision.messages import has_pictures
from .request_handler import RequestHandler
from .security import Caller

TEXT_LENGTHS = 4  # longest text of one call, as a multiple of the model's length


def longest_text(handler: RequestHandler) -> int:
    return TEXT_LENGTHS * handler.engine.info.max_model_len


async def tokenize(
    handler: RequestHandler, prompt: str | ChatPrompt, caller: Caller, *, add_special_tokens: bool = True
) -> list[int]:
    """Return the token ids of a text or a chat. Raises InvalidRequest, RequestTooLong or Overloaded."""
    tokenizer = handler.engine.tokenizer
    encode: Callable[..., list[int]]
    if isinstance(prompt, str):
        encode = functools.partial(tokenizer.encode, prompt, add_special_tokens=add_special_tokens)
    elif has_pictures(prompt.messages):
        return await handler.engine.encode(prompt)
    else:
        encode = functools.partial(tokenizer.apply_chat_template, prompt)
    return await handler.texts.run(handler.tenant(caller), encode, max_tokens=longest_text(handler))


async def detokenize(handler: RequestHandler, ids: Sequence[int], caller: Caller) -> str:
    """Return the text of token ids. Raises InvalidRequest, RequestTooLong or Overloaded."""
    longest, size = longest_text(handler), handler.engine.info.vocab_size
    if len(ids) > longest:
        raise RequestTooLong(
            f"a call must have at most {longest} token ids ({TEXT_LENGTHS} times the model's length), got "
            f"{len(ids)}; send several calls"
        )

    def decode() -> str:
        found = list(ids)
        if (wrong := next((token for token in found if not 0 <= token < size), None)) is not None:
            raise InvalidRequest(f"token ids must be in [0, {size}), got {wrong}; use this model's tokenizer")
        return handler.engine.tokenizer.decode(found)

    return await handler.texts.run(handler.tenant(caller), decode)
