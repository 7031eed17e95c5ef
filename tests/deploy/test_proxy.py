"""The proxy of deploy/nginx before a real server: it passes calls on, and bounds those of one address."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType

import grpc
import grpc.aio
import pytest

from http2_frames import Connection, call, reset
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.client.client import Client
from octavo.proto import generation_pb2 as pb
from served import collect, eventually, served

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/bin:/usr/bin:/opt/homebrew/bin")
CONFIG = Path(__file__).parents[2] / "deploy" / "nginx" / "octavo.conf"

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
]


@contextlib.asynccontextmanager
async def proxy(
    folder: Path, target: str, changes: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[str]:
    """Run the configuration with other ports, and with other values of some directives."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = CONFIG.read_text()
    for old, new in (
        ("server 127.0.0.1:50051", f"server {target}"),
        ("listen 50050", f"listen 127.0.0.1:{port}"),
        ("/run/octavo-nginx.pid", str(folder / "pid")),
        *changes.items(),
    ):
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "octavo.conf"
    path.write_text(re.sub(r"worker_processes auto;", "worker_processes 1; daemon off;", text))
    assert NGINX is not None
    process = await asyncio.create_subprocess_exec(
        NGINX, "-p", str(folder), "-c", str(path), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            await asyncio.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


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
        assert its.server.limiter._num_served <= 30
        assert await its.client.tokenize("a") == [97]


async def test_a_server_that_is_gone_is_unavailable(tmp_path: Path) -> None:
    async with proxy(tmp_path, "127.0.0.1:1") as address, Client(address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.Tokenize(pb.TokenizeRequest(text="a"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
