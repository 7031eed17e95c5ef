from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

import grpc.aio
from google.protobuf.message import Message

from octavo.proto import cache_pb2 as pb

if TYPE_CHECKING:
    from .client import Client


class CacheCalls:
    """RPCs of octavo.v1.Cache, as in ``client.cache.stats()``."""

    def __init__(self, stub: Any, client: Client) -> None:
        self.stub = stub
        self._client = client

    async def call(self, request: Message) -> Any:
        name = type(request).__name__.removesuffix("Request")
        return await self._client.unary(getattr(self.stub, name), request)

    async def stats(self, num_prefixes: int | None = None) -> pb.GetStatsResponse:
        request = pb.GetStatsRequest(num_prefixes=num_prefixes)
        reply: pb.GetStatsResponse = await self.call(request)
        return reply

    async def explain(self, request_id: str) -> pb.ExplainResponse:
        request = pb.ExplainRequest(request_id=request_id)
        reply: pb.ExplainResponse = await self.call(request)
        return reply

    async def save(self, path: str, prompt: pb.Prefix | None = None) -> pb.SaveResponse:
        """Save the pages of a prompt (None: all pages) to ``path`` below the server's --save-dir."""
        request = pb.SaveRequest(path=path, prompt=prompt)
        reply: pb.SaveResponse = await self.call(request)
        return reply

    async def load(self, path: str) -> pb.LoadResponse:
        reply: pb.LoadResponse = await self.call(pb.LoadRequest(path=path))
        return reply

    async def pin(self, name: str, what: pb.Prefix) -> pb.PinResponse:
        request = pb.PinRequest(name=name, prefix=what)
        reply: pb.PinResponse = await self.call(request)
        return reply

    async def unpin(self, name: str) -> pb.UnpinResponse:
        reply: pb.UnpinResponse = await self.call(pb.UnpinRequest(name=name))
        return reply

    async def flush(self) -> int:
        """Discard all unused cached pages and return their number."""
        return int((await self.call(pb.FlushRequest())).num_pages)

    async def watch(
        self, start_number: int | None = None, *, log_id: str = ""
    ) -> AsyncGenerator[pb.WatchResponse, None]:
        """Stream cache events from ``start_number`` on (None: new events). Raises EventsGone or FellBehind if
        events have expired."""
        request = pb.WatchRequest(start_number=start_number, log_id=log_id)
        call = self.stub.Watch(request, metadata=self._client.metadata)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise self._client.translate(error) from error
        finally:
            call.cancel()


def prefix_of(
    *,
    text: str | None = None,
    token_ids: Sequence[int] | None = None,
    request_id: str | None = None,
    cache_salt: str = "",
) -> pb.Prefix:
    prefix = pb.Prefix(text=text, request_id=request_id, cache_salt=cache_salt)
    if token_ids is not None:
        prefix.token_ids.ids.extend(token_ids)
        prefix.token_ids.SetInParent()
    return prefix
