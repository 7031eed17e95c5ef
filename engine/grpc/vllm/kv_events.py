"""Page events for routers, as smg.grpc.common.KvEventBatch. A block is a page.

A router sends a prompt to the worker with the longest cached prefix.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from smg_grpc_proto.generated import common_pb2 as pb

from octavo.block_manager import Digest, PageContents, PageEvent
from octavo.block_manager.digests import media_in, tokens_in
from octavo.block_manager.page_index import parents_first

from ...api.engine_request import salt_and_variant
from ...api.errors import EventsGone, InvalidRequest
from ...api.stats import Gauges
from ...core import commands
from ...core.commands import CachedContents, EventLogState
from ..request_handler import RequestHandler
from ..status import Context

LOAD_S = 1.0  # seconds between load reports
SILENCE_S = 10.0  # seconds after which an unchanged load is sent again
SNAPSHOT_BLOCKS = 1024  # blocks per message of a snapshot
_EPOCH_BITS = 24
_POLL_S = 0.02


class KvEventStream:
    def __init__(self, handler: RequestHandler, salt: bytes, adapter: str | None) -> None:
        self._handler = handler
        self._engine = handler.engine
        self._page_size = handler.engine.info.page_size
        self._salt = salt
        self._adapter = adapter
        self._base = 0
        self._sent = 0
        self._num_samples = 0
        self._load: Gauges | None = None
        self._told_at = 0.0

    async def batches(
        self, request: pb.SubscribeKvEventsRequest, number: int
    ) -> AsyncGenerator[pb.KvEventBatch, None]:
        """Yield batches of events from ``number`` on. Raises FellBehind if this reader is too slow."""
        if not request.start_sequence_number:
            snapshot = await self._engine.run_command(commands.get_cached_contents())
            number = snapshot.number + 1
            pages = await asyncio.to_thread(_own_pages, snapshot, self._is_own)
            for batch in self._snapshot_batches(snapshot, pages):
                yield batch
        async with aclosing(self._handler.page_events.events_from(number, heartbeat_s=LOAD_S)) as stream:
            async for events in stream:
                for event in events:
                    yield self._batch(event.number, self._events(event))
                if not events and self._has_load_to_tell(request):
                    yield self._batch(None, ())

    async def begin(self, request: pb.SubscribeKvEventsRequest, its: EventLogState) -> int:
        """Return the number of the first event to send. Raises EventsGone for an invalid cursor."""
        self._base = int(its.log_began) << _EPOCH_BITS
        cursor: int = request.start_sequence_number
        if not cursor:
            return its.number
        number = cursor - self._base + 1
        if number < its.tokens_since:
            raise EventsGone(
                f"the events after {cursor} are lost: this server keeps only events after "
                f"{self._base + its.tokens_since - 1}; begin again from 0"
            )
        await self._handler.page_events.check_kept(number)
        self._sent = cursor
        return number

    def _batch(self, number: int | None, events: Iterable[pb.KvCacheEvent]) -> pb.KvEventBatch:
        if number is not None:
            self._sent = self._base + number
        self._num_samples += 1
        self._load, self._told_at = self._engine.gauges(), time.monotonic()
        return pb.KvEventBatch(
            sequence_number=self._sent,
            timestamp=time.time(),
            events=events,
            dp_rank=0,
            load=self._load_message(self._load, load_only=number is None),
        )

    def _has_load_to_tell(self, request: pb.SubscribeKvEventsRequest) -> bool:
        if not self._sent and not request.load_records_before_first_batch:
            return False
        return self._engine.gauges() != self._load or time.monotonic() - self._told_at >= SILENCE_S

    def _load_message(self, gauges: Gauges, *, load_only: bool) -> pb.EngineLoad:
        used = gauges.pages_held / self._engine.info.num_pages
        return pb.EngineLoad(
            running_requests=gauges.num_running,
            waiting_requests=gauges.num_waiting,
            token_usage=used,
            active_token_usage=used,
            gen_throughput=self._handler.generated.per_second(),
            max_running_requests=self._engine.config.max_running,
            sample=self._num_samples,
            load_only=load_only,
        )

    def _events(self, event: PageEvent) -> list[pb.KvCacheEvent]:
        digests = event.digests_of(self._salt)
        if self._adapter is not None:
            salts = [event.salt] * len(event.digests) if event.kind == "stored" else event.salts
            own = zip(event.digests, salts, strict=False)
            digests = [digest for digest, salt in own if self._is_own(salt)]
        match event.kind:
            case "stored" if digests:
                stored = self._stored(digests, event.contents, event.parent, event.salt)
                return [pb.KvCacheEvent(event_id=event.number, stored=stored)]
            case "removed" if digests:
                hashes = [block_hash(digest) for digest in digests]
                removed = pb.KvBlocksRemoved(block_hashes=hashes)
                return [pb.KvCacheEvent(event_id=event.number, removed=removed)]
            case "cleared":
                return [pb.KvCacheEvent(event_id=event.number, cleared=pb.KvCacheCleared())]
        return []

    def _stored(
        self, digests: Iterable[Digest], contents: Iterable[bytes], parent: Digest | None, salt: bytes
    ) -> pb.KvBlocksStored:
        blocks = [self._block(digest, contained) for digest, contained in zip(digests, contents, strict=True)]
        own, variant = salt_and_variant(salt.removeprefix(self._salt))
        name = self._names().get(variant, variant.hex()) if variant and self._adapter is None else None
        return pb.KvBlocksStored(
            blocks=blocks,
            parent_block_hash=None if parent is None else block_hash(parent),
            cache_salt=own.decode(errors="replace") if own else None,
            lora_name=name,
        )

    def _names(self) -> dict[bytes, str]:
        return {info.variant: name for name, info in self._engine.adapters.items()}

    def _is_own(self, salt: bytes) -> bool:
        if self._adapter is None or not salt.startswith(self._salt):
            return salt.startswith(self._salt)
        _, variant = salt_and_variant(salt.removeprefix(self._salt))
        return self._names().get(variant) == self._adapter

    def _block(self, digest: Digest, contents: bytes) -> pb.KvBlock:
        size = self._page_size
        return pb.KvBlock(
            block_hash=block_hash(digest),
            token_ids=tokens_in(contents, size),
            block_size=size,
            extra_keys=[
                pb.KvBlockExtraKey(multimodal={"identifier": image.digest.hex(), "offset": image.start})
                for image in media_in(contents, size)
            ],
        )

    def _snapshot_batches(
        self, snapshot: CachedContents, pages: list[tuple[Digest, PageContents]]
    ) -> Iterable[pb.KvEventBatch]:
        if not pages:
            return
        size = max(SNAPSHOT_BLOCKS, -(-len(pages) // snapshot.number))
        count = -(-len(pages) // size)
        for index in range(count):
            events = [] if index else [pb.KvCacheEvent(cleared=pb.KvCacheCleared())]
            for digest, (packed, parent, salt) in pages[index * size : (index + 1) * size]:
                events.append(pb.KvCacheEvent(stored=self._stored([digest], [packed], parent, salt)))
            batch = self._batch(snapshot.number - count + 1 + index, events)
            batch.snapshot.CopyFrom(
                pb.KvSnapshotChunk(
                    index=index, count=count, blocks=len(pages), unknown_before=snapshot.unknown
                )
            )
            yield batch


def _own_pages(
    snapshot: CachedContents, is_own: Callable[[bytes], bool]
) -> list[tuple[Digest, PageContents]]:
    own = {digest: page for digest, page in snapshot.pages.items() if is_own(page.salt)}
    return list(parents_first(own))


def block_hash(digest: Digest) -> int:
    """Return a 64-bit key of a page for routers."""
    return int.from_bytes(digest[-8:], "big", signed=True)


async def write_kv_events(
    handler: RequestHandler,
    request: pb.SubscribeKvEventsRequest,
    context: Context,
    *,
    adapter: str | None,
) -> None:
    """Serve SubscribeKvEvents until the client leaves."""
    stream = KvEventStream(handler, handler.tenant_salt(context), adapter)
    async with handler.page_events.watching(handler.tenant(context), tokens=True) as its:
        number = await stream.begin(request, its)
        await context.send_initial_metadata(())  # routers wait for the metadata
        async with aclosing(stream.batches(request, number)) as batches:
            async for batch in batches:
                await handler.writer.write(context, batch)


async def flush_cache(
    handler: RequestHandler, request: pb.FlushCacheRequest, context: Context
) -> pb.FlushCacheResponse:
    """Discard all cached pages, unless requests are still running after the timeout."""
    handler.check_operator(context, "flush the cache of all tenants")
    if not 0 <= request.timeout_s < math.inf:
        raise InvalidRequest(f"timeout_s must be 0 or more seconds, got {request.timeout_s}")
    engine = handler.engine
    end = time.monotonic() + request.timeout_s
    while (busy := engine.gauges()).num_running + busy.num_waiting and time.monotonic() < end:
        await asyncio.sleep(_POLL_S)
    if left := busy.num_running + busy.num_waiting:
        return pb.FlushCacheResponse(
            success=False,
            message=f"{left} requests are unfinished, so nothing was flushed; wait longer, or stop sending "
            "requests",
        )
    num_pages = await engine.run_command(commands.flush_cache())
    return pb.FlushCacheResponse(success=True, message=f"{num_pages} cached pages were discarded")
