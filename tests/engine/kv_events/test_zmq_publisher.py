"""KV events over ZMQ, read by a client written from vLLM's public schema."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from fake_adapters import FakeAdapters
from fakes import FakeCore, small_config
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.cli import main
from octavo.engine.client.client import Client
from octavo.engine.client.server_process import ServerProcess
from octavo.engine.core import commands
from octavo.engine.kv_events import zmq_publisher
from octavo.engine.kv_events.zmq_publisher import KvEventOptions, KvEventPublisher
from served import Served, collect, eventually_async, served

pytestmark = pytest.mark.server


def schema(*, array_like: bool) -> Any:
    """vLLM's batch types, which refuse unknown fields."""

    def struct(name: str, *fields: tuple[Any, ...], **options: Any) -> type:
        options |= {"array_like": array_like, "forbid_unknown_fields": True}
        return msgspec.defstruct(name, fields, **options)

    keys = list[tuple[str, ...] | None] | None
    stored = struct(
        "BlockStored",
        ("block_hashes", list[int]), ("parent_block_hash", int | None), ("token_ids", list[int]),
        ("block_size", int), ("lora_id", int | None), ("medium", str | None), ("lora_name", str | None),
        ("extra_keys", keys, None), tag="BlockStored",
    )  # fmt: skip
    removed = struct("BlockRemoved", ("block_hashes", list[int]), ("medium", str | None), tag="BlockRemoved")
    cleared = struct("AllBlocksCleared", tag="AllBlocksCleared")
    events = list[stored | removed | cleared]  # type: ignore[valid-type]
    return struct("KVEventBatch", ("ts", float), ("events", events), ("data_parallel_rank", int | None, None))


class Reader:
    def __init__(self, endpoint: str, replay: str, encoding: str, *, lose: int = 0) -> None:
        self._decode = msgspec.msgpack.Decoder(schema(array_like=encoding == "array")).decode
        self._context = zmq.asyncio.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(endpoint)
        self._sub.subscribe(b"kv@")
        self._replay = replay
        self._lose = lose
        self.next = 0
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.salts: set[str] = set()
        self.adapters: set[str | None] = set()
        self.removed = 0
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            _, number, payload = await self._sub.recv_multipart()
            if self._lose == 1:
                self._lose = 0
                continue
            self._lose = max(0, self._lose - 1)
            sequence = int.from_bytes(number, "big")
            if sequence > self.next:
                await self._read_again()
            if sequence >= self.next:
                self._apply(sequence, payload)

    async def _read_again(self) -> None:
        request = self._context.socket(zmq.DEALER)
        request.connect(self._replay)
        await request.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            _, number, payload = await request.recv_multipart()
            if number == b"\xff" * 8:
                break
            self._apply(int.from_bytes(number, "big"), payload)
        request.close(0)

    def _apply(self, sequence: int, payload: bytes) -> None:
        self.next = sequence + 1
        for event in self._decode(payload).events:
            match type(event).__name__:
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    self.removed += len(event.block_hashes)
                    for name in event.block_hashes:
                        del self.blocks[name]
                case _:
                    self.blocks.clear()

    def _store(self, event: Any) -> None:
        before = () if event.parent_block_hash is None else self.blocks[event.parent_block_hash]
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        for index, name in enumerate(event.block_hashes):
            before = self.blocks[name] = (*before, *event.token_ids[index * size : (index + 1) * size])
        self.adapters.add(event.lora_name)
        if event.extra_keys is not None:
            self.salts.update(*(keys for keys in event.extra_keys if keys))

    async def agrees(self, its: Served) -> None:
        async def same() -> bool:
            if self._task.done():
                self._task.result()
            pages = (await its.engine.run_command(commands.get_cached_contents())).pages
            return self.blocks.keys() == {int.from_bytes(digest[-8:], "big") for digest in pages}

        await eventually_async(same, "the index is the cache")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._context.destroy(linger=0)


@asynccontextmanager
async def published(tmp_path: Path, encoding: Any = "array", **reader: Any) -> AsyncIterator[tuple[Any, ...]]:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    options = KvEventOptions(endpoint=endpoint, replay=replay, topic="kv@worker@m", encoding=encoding)
    publisher = KvEventPublisher(options)
    index = Reader(endpoint, replay, encoding, **reader)
    try:
        core = FakeCore(adapters=FakeAdapters())
        async with served(core, config=small_config(num_pages=16)) as its:
            publisher.start(its.engine, its.server.handler.page_events)

            async def is_read() -> bool:
                await say(its, [255] * 10)
                await its.engine.run_command(commands.flush_cache())
                return index.next > 0

            await eventually_async(is_read, "the reader's subscription has come")
            yield its, index, publisher
    finally:
        await index.close()
        await publisher.close()


async def say(its: Served, ids: list[int], **options: Any) -> None:
    await collect(its.client.generate(ids, SamplingParams(max_tokens=1), **options))


@pytest.mark.parametrize("encoding", ["array", "map"])
async def test_a_reader_recovers_from_a_lost_message(tmp_path: Path, encoding: str) -> None:
    async with published(tmp_path, encoding, lose=3) as (its, index, _):
        await its.engine.load_adapter("tale", Path("/srv/tale"))
        for number in range(8):  # 16 pages hold two prompts, so the others are evicted
            named = {"adapter": "tale"} if number == 7 else {}
            await say(its, [number] * 30, salt="s" * (number % 2), **named)
        await index.agrees(its)
        assert index.removed > 0
        assert index.salts == {"s"}
        assert index.adapters == {None, "tale"}
        assert {tokens[0] for tokens in index.blocks.values()} <= set(range(8))
        await its.engine.run_command(commands.flush_cache())
        await index.agrees(its)
        assert index.blocks == {}


async def test_a_publisher_that_fell_behind_sends_the_whole_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with published(tmp_path) as (its, index, publisher):
        await say(its, [1] * 10)
        await index.agrees(its)
        log = its.core.core.cache.blocks.events
        log._capacity = 2
        held = asyncio.Event()
        send = publisher._send

        async def slow(*arguments: Any) -> None:
            await held.wait()
            await send(*arguments)

        monkeypatch.setattr(publisher, "_send", slow)
        for number in range(2, 10):
            await say(its, [number] * 30)
        held.set()
        await index.agrees(its)


async def test_a_replay_sends_kept_events_and_survives_bad_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with published(tmp_path) as (its, index, publisher):
        # Set only now, because a late subscriber needs a replay from the start.
        monkeypatch.setattr(zmq_publisher, "REPLAY_MESSAGES", 2)
        await say(its, [1] * 10)
        await index.agrees(its)
        for number in range(2, 6):
            await say(its, [number] * 10)
        await index.agrees(its)
        context = zmq.asyncio.Context()
        request = context.socket(zmq.DEALER)
        request.connect(f"ipc://{tmp_path}/replay")
        await request.send_multipart([b"nonsense"])
        await request.send_multipart([b"", (0).to_bytes(8, "big")])
        numbers: list[int] = []
        while not numbers or numbers[-1] != -1:
            _, frame, _ = await asyncio.wait_for(request.recv_multipart(), 20)
            numbers.append(int.from_bytes(frame, "big", signed=True))
        assert len(numbers) == 3
        assert numbers[1] == numbers[0] + 1 == publisher._sent[-1][0]
        context.destroy(linger=0)


async def test_a_server_publishes_from_its_first_request_on(tmp_path: Path) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    flags = ["--kv-events-endpoint", endpoint, "--kv-events-replay-endpoint", replay]
    index = Reader(endpoint, replay, "map")
    try:
        async with (
            ServerProcess([*flags, "--kv-events-topic", "kv@x", "--kv-events-encoding", "map"]) as server,
            Client(server.ready["grpc"]) as client,
        ):
            prompt = list(range(40))
            await collect(client.generate(prompt, SamplingParams(max_tokens=1)))

            async def complete() -> bool:
                return max(index.blocks.values(), key=len, default=()) == tuple(prompt[:32])

            await eventually_async(complete, "both full pages were published")
    finally:
        await index.close()


def test_a_replay_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--kv-events-replay-endpoint", "tcp://*:1"]) == 2
    assert "give both options" in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["tcp://*:notaport", "nonsense", "ipc:///no/such/folder/x"])
async def test_an_endpoint_that_cannot_be_used_is_named(endpoint: str) -> None:
    with pytest.raises(InvalidConfig, match="--kv-events-endpoint must be an address"):
        KvEventPublisher(KvEventOptions(endpoint=endpoint))
