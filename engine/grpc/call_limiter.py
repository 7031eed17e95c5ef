from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio

from ..api.errors import InvalidRequest, Overloaded
from ..api.tenant import NO_TENANT, Tenant
from ..frontend.holders import Holders
from ..frontend.text_executor import TextExecutor
from .message_shape import SHORT_MESSAGE, Parse, parsed
from .status import Context, errors_as_status

OPEN_SERVICES = ("/grpc.health.v1.Health/",)  # health checks need no token
MAX_NAMING_BYTES = 4096  # bytes of a message that contains only a name
_NAMING_SERVICES = ("/grpc.health.", "/grpc.reflection.")
BURST_CALLS = 256  # calls after which freed memory is returned to the system
MAX_HEALTH_CALLS = 64  # concurrent health streams
PROBE_PATIENCE_S = 2.0  # seconds to wait for the message of a health check

END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # documented by gRPC but missing in its stubs

TenantOf: TypeAlias = Callable[[Context], Tenant]


@dataclass(frozen=True, slots=True)
class _Method:
    behaviour: Callable[[Any, Context], Any]
    parse: Parse
    streams_requests: bool
    holders: Holders
    patience_s: float
    only_names: bool


class CallLimiter:
    """Limits concurrent calls, and refuses calls without a valid token. A tenant may use only its share."""

    def __init__(self, max_calls: int, *, tenant_of: TenantOf, patience_s: float) -> None:
        self.calls = Holders("calls", "calls are being served", max_calls)
        self.health_calls = Holders("health_calls", "streams watch the health", MAX_HEALTH_CALLS)
        self._tenant_of = tenant_of
        self._patience_s = patience_s
        self._parser = TextExecutor("parse")

    def interceptor(self) -> grpc.aio.ServerInterceptor[Any, Any]:
        return _Admission(self)

    def burst_is_over(self) -> bool:
        calls = self.calls
        if calls.num_begun < BURST_CALLS or 2 * calls.total > calls.peak:
            return False
        calls.num_begun = calls.peak = 0
        return True

    def close(self) -> None:
        self._parser.close()

    def wrapped(self, handler: Any, name: str) -> Any:
        is_open = name.startswith(OPEN_SERVICES)
        method = _Method(
            handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream,
            handler.request_deserializer,
            handler.request_streaming,
            self.health_calls if is_open else self.calls,
            PROBE_PATIENCE_S if is_open else self._patience_s,
            name.startswith(_NAMING_SERVICES),
        )
        is_check = is_open and not handler.response_streaming

        async def admit(_requests: Any, context: Context) -> Any:
            return await (self._answer if is_check else self._serve)(method, context)

        shape = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return shape(admit, None, handler.response_serializer)

    async def _serve(self, method: _Method, context: Context) -> Any:
        async with errors_as_status(context):
            if context.cancelled():
                raise asyncio.CancelledError
            is_counted = method.holders is self.calls
            with method.holders.hold(self._tenant_of(context) if is_counted else NO_TENANT):
                return await self._answer(method, context)

    async def _answer(self, method: _Method, context: Context) -> Any:
        request = (
            self._messages(method, context)
            if method.streams_requests
            else await self._message(method, context)
        )
        if not inspect.isasyncgenfunction(method.behaviour):
            return await method.behaviour(request, context)
        async for response in method.behaviour(request, context):
            await context.write(response)
        return None

    async def _message(self, method: _Method, context: Context) -> Any:
        data = await self._read(method, context)
        if data is END:
            if context.cancelled():
                raise asyncio.CancelledError
            raise InvalidRequest("a call must have one message, got none; send one")
        return await self._parsed(method, data)

    async def _messages(self, method: _Method, context: Context) -> AsyncIterator[Any]:
        read = functools.partial(self._read, method, context) if method.only_names else context.read
        while (data := await read()) is not END:
            message = await self._parsed(method, data)
            del data
            yield message

    async def _read(self, method: _Method, context: Context) -> Any:
        try:
            async with asyncio.timeout(method.patience_s):
                return await context.read()
        except TimeoutError:
            raise Overloaded(
                f"the message of a call must arrive within {method.patience_s:g} s, got none; send it "
                "sooner, or start the server with a longer --write-timeout"
            ) from None

    async def _parsed(self, method: _Method, data: Any) -> Any:
        if method.only_names and len(data) > MAX_NAMING_BYTES:
            raise InvalidRequest(
                f"the message must have at most {MAX_NAMING_BYTES} bytes, got {len(data)}; send only the "
                "name of a service or a type"
            )
        if len(data) <= SHORT_MESSAGE:
            return parsed(data, method.parse)
        return await self._parser.run(NO_TENANT, parsed, data, method.parse)


class _Admission(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not subscriptable at run time
    def __init__(self, limiter: CallLimiter) -> None:
        self._limiter = limiter
        self._admitting: dict[str, Any] = {}

    async def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        if (known := self._admitting.get(details.method)) is not None:
            return known
        if (handler := await continuation(details)) is not None:
            handler = self._admitting[details.method] = self._limiter.wrapped(handler, details.method)
        return handler
