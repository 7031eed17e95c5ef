from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..api.errors import InvalidRequest, SlowReader
from ..api.outputs import Delta
from ..api.sampling_params import SamplingParams
from ..frontend.holders import Holders
from ..grpc.request_handler import RequestHandler
from ..grpc.vllm.model_files import ModelFiles
from .errors import ModelNotServed, named
from .exchange import ByteBudget, ClientGone, Exchange, Receive, Scope, Send
from .logprobs import TokenTexts
from .request_model import LONG_BODY, RequestModel, parse

RequestT = TypeVar("RequestT", bound=RequestModel)


@dataclass(kw_only=True)
class Services:
    handler: RequestHandler
    files: ModelFiles
    bodies: ByteBudget
    answers: ByteBudget
    texts: TokenTexts
    calls: Holders

    def names(self, exchange: Exchange) -> tuple[str, ...]:
        """Return the model's names and the adapters that the caller may use."""
        info = self.handler.engine.info
        return (info.name, *info.aliases, *self.handler.adapters(exchange))

    def adapter(self, name: str | None) -> str | None:
        info = self.handler.engine.info
        return None if name in (None, info.name, *info.aliases) else name

    @property
    def takes_images(self) -> bool:
        return self.handler.engine.info.images is not None

    def check_model(self, name: str | None, exchange: Exchange) -> str:
        """Return the model name for the response. Raises ModelNotServed or Forbidden."""
        names = self.names(exchange)
        if name is None:
            return names[0]
        if name not in names:
            self.handler.adapter_of(exchange, name)
            raise ModelNotServed(
                f"model must be {' or '.join(map(repr, names)):.500} on this server, got "
                f"{name!r:.200}; /v1/models lists the models"
            )
        return name

    def stop_reason(self, delta: Delta, params: SamplingParams) -> str | int | None:
        """Return the stop string or stop id that ended a sample, or None."""
        ids = self.handler.engine.tokenizer.eos_ids - set(params.stop_ids)
        return None if delta.stop_match in ids else delta.stop_match


@dataclass(frozen=True)
class Route:
    """An ASGI application for one path. It checks the caller's token unless it is open."""

    services: Services
    work: Callable[[Exchange], Awaitable[None]]
    is_open: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self.services.handler.writer)
        try:
            try:
                if not self.is_open:
                    self.services.handler.tenant_of(exchange)
                await self.work(exchange)
            except (ClientGone, SlowReader):
                raise
            except Exception as error:
                await exchange.refuse(error)
        except ClientGone:
            await asyncio.sleep(0)
        except SlowReader:
            await exchange.abort()


@dataclass(frozen=True)
class Endpoint(Generic[RequestT]):
    """Parses the body and serves the request until the client disconnects."""

    services: Services
    kind: type[RequestT]
    serve: Callable[[Services, RequestT, Exchange], Awaitable[Any]]

    async def __call__(self, exchange: Exchange) -> None:
        services = self.services
        tenant = services.handler.tenant(exchange)
        with services.calls.hold(tenant):
            with services.bodies.hold(tenant) as take:
                body = await exchange.body(services.bodies, take)
                request = await self._parsed(body, exchange)
                del body
            exchange.request_id = getattr(request, "request_id", None) or exchange.request_id
            async with exchange.until_gone():
                try:
                    await self.serve(services, request, exchange)
                except InvalidRequest as error:
                    raise named(error, request) from None

    async def _parsed(self, body: bytes, exchange: Exchange) -> RequestT:
        if len(body) <= LONG_BODY:
            return parse(self.kind, body)
        handler = self.services.handler
        return await handler.texts.run(handler.tenant(exchange), parse, self.kind, body)
