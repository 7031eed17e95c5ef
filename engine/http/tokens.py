"""/tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

import functools
from typing import Any

from ..api.errors import InvalidRequest, RequestTooLong
from ..chat.tool_choice import tool_use
from .chat import conversation_prompt
from .chat_types import TEMPLATE_WRITES, ConversationFields
from .endpoint import Services
from .exchange import Exchange, json_of
from .prompts import TEXT_LENGTHS
from .request_model import RequestModel, only


class TokenizeRequest(ConversationFields):
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    tokens: list[int]
    model: str | None = None


async def serve_tokenize(services: Services, request: TokenizeRequest, exchange: Exchange) -> None:
    services.check_model(request.model, exchange)
    handler = services.handler
    tokenizer, info = handler.engine.tokenizer, handler.engine.info
    longest = TEXT_LENGTHS * info.max_model_len
    encode: Any
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("a request must have either prompt or messages; give one of them")
    if request.prompt is not None:
        for name in ConversationFields.model_fields:
            only(name, getattr(request, name), (), "a prompt is not a conversation")
        special = request.add_special_tokens is not False
        encode = functools.partial(
            tokenizer.encode, request.prompt, add_special_tokens=special, max_tokens=longest
        )
    else:
        only("add_special_tokens", request.add_special_tokens, (False,), TEMPLATE_WRITES)
        tool_use(tokenizer, request.tools)
        encode = functools.partial(
            tokenizer.apply_chat_template, conversation_prompt(request), max_tokens=longest
        )

    def answer() -> bytes:
        ids = encode()
        strings = [tokenizer.piece(token) for token in ids] if request.return_token_strs else None
        return json_of(
            {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids, "token_strs": strings}
        )

    await exchange.answer_bytes(await handler.texts.run(handler.tenant(exchange), answer))


async def serve_detokenize(services: Services, request: DetokenizeRequest, exchange: Exchange) -> None:
    services.check_model(request.model, exchange)
    handler = services.handler
    longest, size = TEXT_LENGTHS * handler.engine.info.max_model_len, handler.engine.info.vocab_size
    if len(request.tokens) > longest:
        raise RequestTooLong(
            f"tokens must be at most {longest} ids ({TEXT_LENGTHS} times the model's length), got "
            f"{len(request.tokens)}; send several requests"
        )

    def decode(tokens: list[int]) -> str:
        for token in tokens:
            if not 0 <= token < size:
                raise InvalidRequest(f"token ids must be in [0, {size}), got {token}; use ids of this model")
        return handler.engine.tokenizer.decode(tokens)

    text = await handler.texts.run(handler.tenant(exchange), decode, request.tokens)
    await exchange.answer({"prompt": text})
