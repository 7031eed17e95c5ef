from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from behind_nginx import NGINX, proxy
from http2_frames import Connection, call, reset
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.client.client import Client
from octavo.proto import generation_pb2 as pb
from served import collect, eventually, served

pytestmark = [pytest.mark.server, pytest.mark.skipif(NGINX is None, reason="nginx is not installed")]


async def test_calls_of_every_shape_pass(tmp_path: Path) -> None:
    async with served() as its, proxy(tmp_path, its.address) as address, Client(address) as client:
        whole = await collect(client.generate("hello", SamplingParams(max_tokens=20)))
        assert len(whole[0].token_ids) == 20
        assert await client.tokenize("ab") == [97, 98]
        batch = client.stub.GenerateMany()
        await batch.write(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=1)))
        assert (await batch.read()).token_ids
        await batch.done_writing()


async def test_one_address_may_have_so_many_calls_at_once(tmp_path: Path) -> None:
    changes = {"octavo_streams 512": "octavo_streams 4"}
    async with served() as its, proxy(tmp_path, its.address, changes) as address, Client(address) as client:
        batches = [client.stub.GenerateMany() for _ in range(10)]
        await eventually(lambda: sum(batch.done() for batch in batches) == 6, "six are refused")
        codes = [await batch.code() for batch in batches if batch.done()]
        assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 6
        await eventually(lambda: its.server.limiter.calls.total == 4, "four are served")
        for batch in batches:
            batch.cancel()


async def test_reset_streams_are_bounded_for_an_address(tmp_path: Path) -> None:
    changes = {"rate=200r/s": "rate=1r/s", "burst=1000": "burst=20"}
    async with served() as its, proxy(tmp_path, its.address, changes) as address:
        connection = await Connection.open(address)
        path = "/octavo.v1.Generation/Tokenize"
        for at in range(1, 2001, 2):
            await connection.send(call(at, path) + reset(at))
        await asyncio.sleep(0.5)
        await connection.close()
        assert its.server.limiter.calls.num_begun <= 30
        assert await its.client.tokenize("a") == [97]


async def test_a_server_that_is_gone_is_unavailable(tmp_path: Path) -> None:
    async with proxy(tmp_path, "127.0.0.1:1") as address, Client(address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.Tokenize(pb.TokenizeRequest(text="a"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
