"""/tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

from ..api.errors import InvalidRequest
from ..chat.tool_choice import tool_use
from ..grpc.tokenization import detokenize, tokenize
from .chat import TEMPLATE_WRITES, ConversationFields, conversation_prompt
from .endpoint import Services
from .exchange import Exchange, json_of
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
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("a request must have either prompt or messages; give one of them")
    if request.prompt is not None:
        for name in ConversationFields.model_fields:
            only(name, getattr(request, name), (), "a prompt is not a conversation")
        special = request.add_special_tokens is not False
        ids = await tokenize(handler, request.prompt, exchange, add_special_tokens=special)
    else:
        only("add_special_tokens", request.add_special_tokens, (False,), TEMPLATE_WRITES)
        tool_use(tokenizer, request.tools)
        ids = await tokenize(handler, conversation_prompt(request), exchange)

    def answer() -> bytes:
        strings = [tokenizer.piece(token) for token in ids] if request.return_token_strs else None
        return json_of(
            {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids, "token_strs": strings}
        )

    await exchange.answer_bytes(await handler.texts.run(handler.tenant(exchange), answer))


async def serve_detokenize(services: Services, request: DetokenizeRequest, exchange: Exchange) -> None:
    services.check_model(request.model, exchange)
    await exchange.answer({"prompt": await detokenize(services.handler, request.tokens, exchange)})
