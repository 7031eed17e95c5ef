from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import common_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from fake_adapters import FakeAdapters
from fakes import FakeCore, byte_tokenizer, small_config
from octavo.block_manager.events import EventLog
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.client.credentials import ClientCredentials
from octavo.engine.grpc.security import Security
from octavo.engine.grpc.vllm import kv_events
from served import LOCAL, collect, eventually_async
from vllm_worker import Worker, pause, worker

pytestmark = pytest.mark.server

PROMPT = list(range(10, 32))  # five pages of 4 tokens, and two more tokens


class Index:
    def __init__(self) -> None:
        self.path: dict[int, tuple[int, ...]] = {}  # block hash: all tokens up to the end of the block
        self.last = 0

    def apply(self, batch: pb.KvEventBatch) -> None:
        if batch.load.load_only:
            assert (batch.sequence_number, len(batch.events)) == (self.last, 0)
            return
        assert not self.last or batch.sequence_number == self.last + 1, "numbers have no gaps"
        self.last = batch.sequence_number
        for event in batch.events:
            match event.WhichOneof("data"):
                case "stored":
                    self._store(event.stored)
                case "removed":
                    for block in event.removed.block_hashes:
                        self.path.pop(block, None)
                case "cleared":
                    self.path.clear()

    def _store(self, stored: pb.KvBlocksStored) -> None:
        before = self.path[stored.parent_block_hash] if stored.HasField("parent_block_hash") else ()
        for block in stored.blocks:
            assert len(block.token_ids) == block.block_size == 4
            before = self.path[block.block_hash] = (*before, *block.token_ids)

    def knows(self, tokens: list[int]) -> int:
        paths = set(self.path.values())
        return max((n for n in range(len(tokens) + 1) if tuple(tokens[:n]) in paths), default=0)


class Router:
    def __init__(
        self, its: Worker, cursor: int = 0, index: Index | None = None, metadata: Any = (), **options: Any
    ) -> None:
        self.index = index or Index()
        self.batches: list[pb.KvEventBatch] = []
        request = pb.SubscribeKvEventsRequest(start_sequence_number=cursor, **options)
        self.call = its.stub.SubscribeKvEvents(request, metadata=metadata)
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for batch in self.call:
            self.batches.append(batch)
            self.index.apply(batch)

    async def __aenter__(self) -> Router:
        await asyncio.wait_for(self.call.initial_metadata(), 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await asyncio.wait([self._task])

    async def learns(self, tokens: list[int], num_tokens: int) -> None:
        async def known() -> bool:
            if self._task.done():
                self._task.result()
            return self.index.knows(tokens) == num_tokens

        await eventually_async(known, f"the router knows {num_tokens} of {tokens}")

    async def refusal(self) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(self._task, 20)
        return caught.value.code()


async def say(its: Worker, ids: list[int], *, salt: str = "", adapter: str | None = None) -> None:
    params = SamplingParams(max_tokens=1)
    await collect(its.its.client.generate(ids, params, salt=salt, adapter=adapter))


def log_of(its: Worker) -> EventLog:
    core = its.its.core.core
    assert core is not None
    return core.cache.blocks.events


async def subscribed(its: Worker) -> None:
    async def keeps() -> bool:
        return log_of(its).tokens_since is not None

    await eventually_async(keeps, "tokens are kept")


@pytest.mark.parametrize("of_tenant", [False, True])
async def test_pages_of_adapters_are_named(of_tenant: bool, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("alice Alice0\n")
    security = Security(token_file=tmp_path / "tokens") if of_tenant else None
    credentials = ClientCredentials(token_file=tmp_path / "tokens") if of_tenant else None
    core = FakeCore(tokenizer=byte_tokenizer(), adapters=FakeAdapters())
    async with worker(core, security=security, credentials=credentials) as its:
        metadata = its.its.client.metadata or ()
        await its.its.engine.load_adapter("tale", Path("/srv/tale"))
        port = await its.its.server.start_adapter("tale", LOCAL)
        async with (
            grpc.aio.insecure_channel(str(port)) as channel,
            Router(its, metadata=metadata) as base,
            Router(replace(its, stub=vllm_engine_pb2_grpc.VllmEngineStub(channel)), metadata=metadata) as own,
        ):
            await subscribed(its)
            await say(its, PROMPT, adapter="tale", salt="s")
            await base.learns(PROMPT, 20)
            await own.learns(PROMPT, 20)
            other = [*range(100, 122)]
            await say(its, other)
            await base.learns(other, 20)
            for number in range(16):
                await say(its, [number] * 40)
            await own.learns(PROMPT, 0)
            assert own.index.path == {}, "pages of the model alone are not the adapter's"
            stored = [e.stored for b in base.batches for e in b.events if e.HasField("stored")]
            assert {(each.lora_name, each.cache_salt) for each in stored} == {("tale", "s"), ("", "")}
            stored = [e.stored for b in own.batches for e in b.events if e.HasField("stored")]
            assert {(each.lora_name, each.cache_salt) for each in stored} == {("", "s")}


async def test_a_router_learns_of_stored_and_removed_pages() -> None:
    async with worker(config=small_config(num_pages=16)) as its, Router(its) as router:
        await subscribed(its)
        await say(its, PROMPT)
        await router.learns(PROMPT, 20)
        other = [*PROMPT[:8], *range(100, 110)]
        await say(its, other)
        await router.learns(other, 16)
        for number in range(6):
            await say(its, [number] * 40)
        await router.learns(PROMPT, 0)
        await say(its, [*range(200, 222)])
        await router.learns([*range(200, 222)], 20)
        reply = await its.stub.FlushCache(pb.FlushCacheRequest())
        assert (reply.success, "discarded" in reply.message) == (True, True)
        await router.learns([*range(200, 222)], 0)
        assert router.index.path == {}
        loads = [batch.load for batch in router.batches]
        assert [load.sample for load in loads] == list(range(1, len(loads) + 1))
        assert {load.max_running_requests for load in loads} == {8}


async def test_a_late_router_begins_with_the_cached_pages() -> None:
    async with worker(config=small_config(num_pages=64)) as its:
        await say(its, [250] * 22)
        async with Router(its):
            await subscribed(its)
        other = [*PROMPT[:8], *range(100, 110)]
        await say(its, PROMPT)
        await say(its, other)
        await say(its, [250] * 30)
        async with Router(its) as late:
            await late.learns(PROMPT, 20)
            await late.learns(other, 16)
            assert late.index.knows([250] * 30) == 0
            first = late.batches[0]
            assert (first.snapshot.index, first.snapshot.count, first.snapshot.blocks) == (0, 1, 7)
            assert first.snapshot.unknown_before == 1
            assert first.events[0].WhichOneof("data") == "cleared"
            await say(its, list(range(60, 80)))
            await late.learns(list(range(60, 80)), 16 + 4)


async def test_a_large_snapshot_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "SNAPSHOT_BLOCKS", 3)
    async with worker() as its:
        async with Router(its):
            await subscribed(its)
        for number in range(4):
            await say(its, [number] * 13)
        async with Router(its) as late:
            for number in range(4):
                await late.learns([number] * 13, 12)
            assert [batch.snapshot.index for batch in late.batches[:4]] == [0, 1, 2, 3]
            assert {batch.snapshot.blocks for batch in late.batches[:4]} == {12}


async def test_a_router_resumes_or_gets_an_error() -> None:
    async with worker() as its:
        async with Router(its) as router:
            await subscribed(its)
            await say(its, PROMPT)
            await router.learns(PROMPT, 20)
        other = [*PROMPT[:8], *range(100, 110)]
        await say(its, other)
        async with Router(its, router.index.last, router.index) as again:
            await again.learns(other, 16)
            assert len(again.batches) == 1, "what it had already is not sent again"
        for cursor in (1, router.index.last - (1 << 24), router.index.last + 1000):
            request = pb.SubscribeKvEventsRequest(start_sequence_number=cursor)
            call = its.stub.SubscribeKvEvents(request)
            assert await asyncio.wait_for(call.initial_metadata(), 20) == ()
            assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.OUT_OF_RANGE


async def test_the_load_is_sent_while_no_page_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "LOAD_S", 0.02)
    monkeypatch.setattr(kv_events, "SILENCE_S", 0.05)
    async with (
        worker(FakeCore(before_step=pause)) as its,
        Router(its) as old,
        Router(its, load_records_before_first_batch=True) as new,
    ):

        async def told() -> bool:
            return len(new.batches) >= 2

        await eventually_async(told, "heartbeats")
        assert {(batch.sequence_number, batch.load.load_only) for batch in new.batches} == {(0, True)}
        assert old.batches == [], "it would take them for events"
        await say(its, PROMPT)
        await old.learns(PROMPT, 20)
        count = len(old.batches)

        async def again() -> bool:
            return len(old.batches) > count + 1

        await eventually_async(again, "heartbeats after an event")
        assert old.batches[-1].load.load_only


async def test_blocks_of_other_tenants_are_not_sent(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a alice-0123456789\nb bob-0123456789\n")
    (tmp_path / "a").write_text("alice-0123456789")
    (tmp_path / "b").write_text("bob-0123456789")
    alice, bob = (ClientCredentials(token_file=tmp_path / name) for name in "ab")
    async with worker(security=Security(token_file=tokens), credentials=alice) as its:
        call = its.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(), metadata=bob.metadata())
        await call.initial_metadata()
        await subscribed(its)
        await say(its, PROMPT)
        batch = await asyncio.wait_for(call.read(), 20)
        assert (batch.sequence_number > 0, len(batch.events)) == (True, 0)
        call.cancel()
        own = its.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(), metadata=alice.metadata())
        batch = await asyncio.wait_for(own.read(), 20)
        assert [event.WhichOneof("data") for event in batch.events] == ["cleared"] + ["stored"] * 5
        own.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await its.stub.FlushCache(pb.FlushCacheRequest(), metadata=alice.metadata())
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_salted_prompt_says_its_salt() -> None:
    async with worker() as its, Router(its) as router:
        await subscribed(its)
        await say(its, PROMPT, salt="s")
        await router.learns(PROMPT, 20)
        assert router.batches[0].events[0].stored.cache_salt == "s"


async def test_a_flush_waits_for_requests_and_then_gives_up() -> None:
    async with worker(FakeCore(before_step=pause), config=small_config(num_pages=1000)) as its:
        running = its.its.client.generate(PROMPT, SamplingParams(max_tokens=3900, ignore_eos=True))
        await anext(running)
        reply = await its.stub.FlushCache(pb.FlushCacheRequest(timeout_s=0.05))
        assert (reply.success, "1 requests are unfinished" in reply.message) == (False, True)
        waiting = asyncio.ensure_future(its.stub.FlushCache(pb.FlushCacheRequest(timeout_s=30)))
        await asyncio.sleep(0.05)
        await running.aclose()
        assert (await waiting).success
        assert its.its.engine.gauges().pages_idle_cached >= 0
        assert await its.its.client.cache.flush() == 0
        for wrong in (-1.0, float("nan"), float("inf")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await its.stub.FlushCache(pb.FlushCacheRequest(timeout_s=wrong))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
