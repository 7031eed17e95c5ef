"""How many calls are served at once, whatever they are; and how a call is refused before its body comes."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from ..api.errors import OctavoError, Overloaded
from .status import Context, abort_with

OPEN_SERVICES = ("/grpc.health.v1.Health/",)  # for probes: no token is asked for, and nothing is counted
BURST_CALLS = 256  # served, after which it is worth asking for memory that they left


def refusing(handler: Any, error: OctavoError) -> Any:
    """A handler that ends every call of a method with the error.

    It is one of *streaming requests*, whatever the method is: gRPC receives a single request, up to the
    largest that is allowed, before it calls a handler, but those of a stream only as they are asked for.
    """

    async def refuse(_requests: Any, context: Context) -> None:
        await abort_with(context, error)

    shape = (
        grpc.stream_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.stream_unary_rpc_method_handler
    )
    return shape(refuse, handler.request_deserializer, handler.response_serializer)


class CallLimiter(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not subscriptable at run time
    """Refuses calls while ``max_calls`` are being served; health checks are always answered."""

    def __init__(self, max_calls: int) -> None:
        self.num_calls = 0
        self._num_served = self._most_calls = 0  # since the last burst
        self._max_calls = max_calls
        self._counted: dict[str, Any] = {}  # by method: the handler that counts

    async def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(OPEN_SERVICES):
            return handler
        if self.num_calls >= self._max_calls:
            error = Overloaded(
                f"{self.num_calls} calls are being served and at most {self._max_calls} may be; "
                "try again later",
                calls=self.num_calls,
                max_calls=self._max_calls,
            )
            return refusing(handler, error)
        if details.method not in self._counted:
            self._counted[details.method] = self._counting(handler)
        return self._counted[details.method]

    def burst_is_over(self) -> bool:
        """Whether many calls were served, and most of those at once have ended; True once for each burst."""
        if self._num_served < BURST_CALLS or 2 * self.num_calls > self._most_calls:
            return False
        self._num_served = self._most_calls = 0
        return True

    def _begin(self) -> None:
        self.num_calls += 1
        self._num_served += 1
        self._most_calls = max(self._most_calls, self.num_calls)

    def _counting(self, handler: Any) -> Any:
        """The same handler, whose calls are counted."""
        shape, behaviour = {
            (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
        }[handler.request_streaming, handler.response_streaming]
        wrap = self._generator if inspect.isasyncgenfunction(behaviour) else self._function
        return shape(wrap(behaviour), handler.request_deserializer, handler.response_serializer)

    def _function(self, behaviour: Callable[[Any, Context], Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def counted(request: Any, context: Context) -> Any:
            self._begin()
            try:
                return await behaviour(request, context)
            finally:
                self.num_calls -= 1

        return counted

    def _generator(
        self, behaviour: Callable[[Any, Context], AsyncIterator[Any]]
    ) -> Callable[..., AsyncIterator[Any]]:
        async def counted(request: Any, context: Context) -> AsyncIterator[Any]:
            self._begin()
            try:
                async for response in behaviour(request, context):
                    yield response
            finally:
                self.num_calls -= 1

        return counted
