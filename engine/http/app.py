from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.routing import Route as StarletteRoute

import octavo

from .adapters import LoadRequest, UnloadRequest, serve_load, serve_unload
from .chat import ChatRequest, serve_chat
from .completions import CompletionRequest, serve_completions
from .embeddings import EmbeddingRequest, serve_embeddings
from .endpoint import Endpoint, Route, Services
from .errors import HttpRefusal, ModelNotServed, error_form
from .exchange import Exchange, json_of
from .messages import CountRequest, MessagesRequest, serve_count, serve_messages
from .rerank import RerankRequest, serve_rerank
from .responses import ResponsesRequest, serve_responses
from .tokens import DetokenizeRequest, TokenizeRequest, serve_detokenize, serve_tokenize

Render = Callable[[], tuple[str, bytes]]
Check = Callable[[], str | None]
POSTS: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (ChatRequest, serve_chat),
    "/v1/messages": (MessagesRequest, serve_messages),
    "/v1/messages/count_tokens": (CountRequest, serve_count),
    "/v1/responses": (ResponsesRequest, serve_responses),
    "/v1/completions": (CompletionRequest, serve_completions),
    "/v1/embeddings": (EmbeddingRequest, serve_embeddings),
    "/v1/rerank": (RerankRequest, serve_rerank),
    "/v2/rerank": (RerankRequest, serve_rerank),
    "/rerank": (RerankRequest, serve_rerank),
    "/tokenize": (TokenizeRequest, serve_tokenize),
    "/detokenize": (DetokenizeRequest, serve_detokenize),
    "/v1/load_lora_adapter": (LoadRequest, serve_load),
    "/v1/unload_lora_adapter": (UnloadRequest, serve_unload),
}


def make_app(services: Services, *, check: Check, render: Render) -> Starlette:
    status = _Status(services, check, render)
    gets: dict[str, tuple[Callable[[Exchange], Awaitable[None]], bool]] = {
        "/health": (status.health, True),
        "/ping": (status.health, True),
        "/version": (status.version, True),
        "/metrics": (status.metrics, False),
        "/v1/models": (status.models, False),
        "/v1/models/{name:path}": (status.model, False),
    }
    routes: list[BaseRoute] = [
        StarletteRoute(path, Route(services, work, is_open=is_open), methods=["GET"])
        for path, (work, is_open) in gets.items()
    ]
    routes += [
        StarletteRoute(
            path, Route(services, Endpoint(services, kind, serve), is_open=False), methods=["POST"]
        )
        for path, (kind, serve) in POSTS.items()
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _refuse})


def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    text = f"{path:.200} is not a path of this server; docs/http-api.md lists them"
    if error.status_code == 405:
        text = f"{path} does not accept {request.method}; use {(error.headers or {}).get('Allow', 'another')}"
    body = json_of(error_form(path).body(HttpRefusal(error.status_code, text)))
    return Response(body, error.status_code, dict(error.headers or {}), "application/json")


class _Status:
    def __init__(self, services: Services, check: Check, render: Render) -> None:
        self._services = services
        self._check = check
        self._render = render
        self._created = int(time.time())

    async def health(self, exchange: Exchange) -> None:
        reason = self._check()
        body = {"status": "ok"} if reason is None else {"status": "unavailable", "reason": reason}
        await exchange.answer(body, status=200 if reason is None else 503)

    async def version(self, exchange: Exchange) -> None:
        await exchange.answer({"version": octavo.__version__})

    async def metrics(self, exchange: Exchange) -> None:
        kind, body = await asyncio.to_thread(self._render)
        await exchange.answer_bytes(body, content_type=kind.encode())

    async def models(self, exchange: Exchange) -> None:
        data = [self._card(name) for name in self._services.names(exchange)]
        await exchange.answer({"object": "list", "data": data})

    async def model(self, exchange: Exchange) -> None:
        name = exchange.scope["path_params"]["name"]
        if name not in self._services.names(exchange):
            raise ModelNotServed(f"model {name!r:.200} is not served here; /v1/models lists the models")
        await exchange.answer(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        engine = self._services.handler.engine
        info, adapter = engine.info, engine.adapters.get(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "octavo",
            "root": info.name if adapter is None else adapter.path,
            "parent": None if adapter is None else info.name,
            "max_model_len": info.max_model_len,
        }
