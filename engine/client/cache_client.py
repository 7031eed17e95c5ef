from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

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
        return cast(pb.GetStatsResponse, await self.call(pb.GetStatsRequest(num_prefixes=num_prefixes)))

    async def explain(self, request_id: str) -> pb.ExplainResponse:
        return cast(pb.ExplainResponse, await self.call(pb.ExplainRequest(request_id=request_id)))

    async def save(self, path: str, prompt: pb.Prefix | None = None) -> pb.SaveResponse:
        """Save the pages of a prompt (None: all pages) to ``path`` below the server's --save-dir."""
        return cast(pb.SaveResponse, await self.call(pb.SaveRequest(path=path, prompt=prompt)))

    async def load(self, path: str) -> pb.LoadResponse:
        return cast(pb.LoadResponse, await self.call(pb.LoadRequest(path=path)))

    async def pin(self, name: str, what: pb.Prefix) -> pb.PinResponse:
        return cast(pb.PinResponse, await self.call(pb.PinRequest(name=name, prefix=what)))

    async def unpin(self, name: str) -> pb.UnpinResponse:
        return cast(pb.UnpinResponse, await self.call(pb.UnpinRequest(name=name)))

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
        async with aclosing(self._client.stream(call)) as responses:
            async for response in responses:
                yield response


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
