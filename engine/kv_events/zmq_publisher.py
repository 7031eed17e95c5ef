"""Publisher of KV events over ZMQ in vLLM's schema.

A message has three frames: topic, sequence number (8 bytes, big-endian) and a msgpack batch.
Source of the format: vllm/distributed/kv_events.py of vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from octavo.block_manager import Digest, PageEvent
from octavo.block_manager.digests import media_in, tokens_in
from octavo.block_manager.page_index import parents_first

from ..api.engine_request import salt_and_variant
from ..api.errors import EngineDead, FellBehind, InvalidConfig
from ..api.tenant import NO_TENANT
from ..core import commands
from ..core.commands import CachedContents
from ..grpc.page_events import PageEventHub

if TYPE_CHECKING:
    from ..frontend.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

MEDIUM = "GPU"  # constant in vLLM's events
REPLAY_MESSAGES = 10_000  # messages kept for replays; vLLM calls this buffer_steps
REPLAY_BYTES = 64 * 2**20
MAX_REPLAYS = 8  # concurrent replays
REPLAY_QUEUE = 64  # unsent messages per reader of a replay
REPLAY_PAUSE_S = 0.01  # seconds between attempts to send to a full queue
REPLAY_TIMEOUT_S = 30.0
REPLAY_BURST = 16
HEARTBEAT_S = 60.0
END = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventOptions:
    endpoint: str
    replay: str | None = None
    topic: str = ""
    encoding: Literal["array", "map"] = "array"


class KvEventPublisher:
    """Publisher of every change of the prefix cache.

    The sockets are open to every reader, and events carry the token ids of all tenants' prompts.
    """

    def __init__(self, options: KvEventOptions) -> None:
        """Open the sockets. Raises InvalidConfig if a package is missing or an endpoint cannot be used."""
        try:
            import msgspec
            import zmq.asyncio
        except ImportError as error:
            raise InvalidConfig(
                f"--kv-events-endpoint needs pyzmq and msgspec ({error}); in the checkout run "
                "`pip install '.[zmq]'`, or leave the option out"
            ) from error
        self._options = options
        self._encode = msgspec.msgpack.encode
        self._sent: deque[tuple[int, bytes]] = deque()
        self._sent_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._context = zmq.asyncio.Context()
        self._pub = self._open(zmq.PUB, options.endpoint, "--kv-events-endpoint")
        self._router = None
        if options.replay is not None:
            self._router = self._open(zmq.ROUTER, options.replay, "--kv-events-replay-endpoint")

    def _open(self, kind: int, endpoint: str, option: str) -> Any:
        import zmq

        socket = self._context.socket(kind)
        socket.linger = 0
        if kind == zmq.ROUTER:
            socket.sndhwm = REPLAY_QUEUE
            socket.router_mandatory = 1  # sending to a full queue fails; otherwise messages are dropped
        else:
            socket.sndhwm = 2 * REPLAY_MESSAGES
        binds = kind == zmq.ROUTER or "*" in endpoint or endpoint.startswith("ipc://")
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidConfig(
                f"{option} must be an address that ZMQ can {'bind' if binds else 'connect to'}, such as "
                f"tcp://*:5557, got {endpoint} ({error}); give another"
            ) from error
        return socket

    def start(self, engine: AsyncEngine, hub: PageEventHub) -> None:
        """Begin to publish. Call it before the first request."""
        self._tasks.append(asyncio.create_task(self._publish(engine, hub)))
        if self._router is not None:
            self._tasks.append(asyncio.create_task(self._serve_replays()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _publish(self, engine: AsyncEngine, hub: PageEventHub) -> None:
        try:
            async with hub.watching(NO_TENANT, tokens=True):
                while True:
                    try:
                        await self._follow(engine, hub)
                    except FellBehind as error:
                        logger.warning("KV events: %s; all cached pages are published again", error)
        except EngineDead:
            pass
        except Exception:
            logger.exception("publishing KV events has failed and stops")

    async def _follow(self, engine: AsyncEngine, hub: PageEventHub) -> None:
        contents = await engine.run_command(commands.get_cached_contents())
        if self._sent or contents.pages:
            events = await asyncio.to_thread(_snapshot, contents)
            await self._send(contents.number, events, engine)
        async with aclosing(hub.events_from(contents.number + 1, heartbeat_s=HEARTBEAT_S)) as stream:
            async for events in stream:
                for event in events:
                    await self._send(event.number, (event,), engine)

    async def _send(self, number: int, events: Iterable[PageEvent], engine: AsyncEngine) -> None:
        sequence = number - 1
        payload = self._payload(events, engine)
        await self._pub.send_multipart([self._options.topic.encode(), _frame(sequence), payload])
        self._sent.append((sequence, payload))
        self._sent_bytes += len(payload)
        while len(self._sent) > REPLAY_MESSAGES or self._sent_bytes > REPLAY_BYTES:
            self._sent_bytes -= len(self._sent.popleft()[1])

    def _payload(self, events: Iterable[PageEvent], engine: AsyncEngine) -> bytes:
        names = {info.variant: name for name, info in engine.adapters.items()}
        structures, now = [_structure(event, engine.info.page_size, names) for event in events], time.time()
        if self._options.encoding == "map":
            tagged = [{"type": tag, **fields} for tag, fields in structures]
            return self._encode({"ts": now, "events": tagged, "data_parallel_rank": 0})
        return self._encode([now, [[tag, *fields.values()] for tag, fields in structures], 0])

    async def _serve_replays(self) -> None:
        assert self._router is not None
        slots = asyncio.Semaphore(MAX_REPLAYS)
        async with asyncio.TaskGroup() as group:
            while True:
                await slots.acquire()
                frames = await self._router.recv_multipart()
                await asyncio.sleep(0)
                if len(frames) == 3:
                    replay = group.create_task(self._replay(frames[0], int.from_bytes(frames[2], "big")))
                    replay.add_done_callback(lambda _: slots.release())
                    continue
                slots.release()
                logger.warning("KV events: a request for a replay must have 3 frames, got %d", len(frames))

    async def _replay(self, reader: bytes, first: int) -> None:
        import zmq

        assert self._router is not None
        kept = [(_frame(sequence), payload) for sequence, payload in self._sent if sequence >= first]
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                for at, message in enumerate([*kept, (END, b"")], 1):
                    while True:
                        try:
                            await self._router.send_multipart([reader, b"", *message], flags=zmq.NOBLOCK)
                            break
                        except zmq.Again:
                            await asyncio.sleep(REPLAY_PAUSE_S)
                    if at % REPLAY_BURST == 0:
                        await asyncio.sleep(0)
        except (TimeoutError, zmq.ZMQError) as error:
            logger.warning("KV events: a replay ended early: %s", error or "the reader was too slow")


def _frame(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def _snapshot(contents: CachedContents) -> list[PageEvent]:
    number = contents.number
    stored = [
        PageEvent(number, "stored", (digest,), page.parent, page.salt, (page.tokens,))
        for digest, page in parents_first(contents.pages)
    ]
    return [PageEvent(number, "cleared"), *stored]


def _structure(event: PageEvent, page_size: int, names: Mapping[bytes, str]) -> tuple[str, dict[str, Any]]:
    if event.kind == "cleared":
        return "AllBlocksCleared", {}
    hashes = [_block_hash(digest) for digest in event.digests]
    if event.kind == "removed":
        return "BlockRemoved", {"block_hashes": hashes, "medium": MEDIUM}
    salt, variant = salt_and_variant(event.salt)
    return "BlockStored", {
        "block_hashes": hashes,
        "parent_block_hash": None if event.parent is None else _block_hash(event.parent),
        "token_ids": [token for contents in event.contents for token in tokens_in(contents, page_size)],
        "block_size": page_size,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": names.get(variant, variant.hex()) if variant else None,
        "extra_keys": _extra_keys(event, salt, page_size),
    }


def _extra_keys(
    event: PageEvent, salt: bytes, page_size: int
) -> list[list[str | list[str | int]] | None] | None:
    keys: list[list[str | list[str | int]]] = [
        [[image.digest.hex(), image.start] for image in media_in(contents, page_size)]
        for contents in event.contents
    ]
    if salt and event.parent is None:
        keys[0].insert(0, salt.decode(errors="replace"))
    return [each or None for each in keys] if any(keys) else None


def _block_hash(digest: Digest) -> int:
    return int.from_bytes(digest[-8:], "big")
