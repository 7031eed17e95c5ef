"""An HTTP server and a gRPC server on free ports, over a ledger engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import openai

from engines import Gate
from fakes import FakeCore
from octavo.engine.api.address import bound_socket
from octavo.engine.api.config import EngineConfig
from octavo.engine.frontend.async_engine import AsyncEngine
from octavo.engine.grpc.security import Security
from octavo.engine.grpc.server import GrpcServer
from octavo.engine.http.server import HttpServer
from served import LOCAL, Served, served


def openai_client(ready: dict[str, str], key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{ready['http']}/v1", api_key=key, max_retries=0, timeout=60)


@asynccontextmanager
async def package_clients(address: str) -> AsyncIterator[tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]]:
    """Return clients without retries and without CA certificates, which take 20 ms to load."""
    options: Any = {"api_key": "none", "max_retries": 0, "timeout": 30}
    plain = openai.DefaultAsyncHttpxClient(verify=False), anthropic.DefaultAsyncHttpxClient(verify=False)
    async with (
        openai.AsyncOpenAI(base_url=f"http://{address}/v1", http_client=plain[0], **options) as chat,
        anthropic.AsyncAnthropic(base_url=f"http://{address}", http_client=plain[1], **options) as claude,
    ):
        yield chat, claude


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Return the data of a stream's events; the end marker must be there."""
        lines = [line for line in self.body.decode().split("\n\n") if line]
        assert lines[-1] == "data: [DONE]", self.body[-200:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@dataclass(frozen=True)
class HttpServed:
    server: HttpServer
    address: str
    below: Served | None = None

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.ask("POST", path, data, {"content-type": "application/json", **headers})

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.ask("GET", path, b"", headers)

    async def ask(self, method: str, path: str, data: bytes, headers: dict[str, str]) -> Reply:
        reader, writer = await self.connect()
        lines = [
            f"{method} {path} HTTP/1.1",
            "host: test",
            "connection: close",
            f"content-length: {len(data)}",
        ]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        try:
            return parse_reply(await asyncio.wait_for(reader.read(), 60))
        finally:
            writer.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.address.rsplit(":", 1)
        return await asyncio.open_connection(host, int(port))


def parse_reply(data: bytes) -> Reply:
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    else:
        body = rest
    return Reply(int(first.split()[1]), headers, body)


@asynccontextmanager
async def http_served(
    core: FakeCore | None = None,
    *,
    gate: Gate | None = None,
    config: EngineConfig | None = None,
    security: Security | None = None,
    **options: Any,
) -> AsyncIterator[HttpServed]:
    async with (
        served(core, gate=gate, config=config, security=security) as below,
        beside(below.server, **options) as (server, address),
    ):
        try:
            yield HttpServed(server, address, below)
        finally:
            if gate is not None:
                gate.open()


@asynccontextmanager
async def demo_http(**settings: Any) -> AsyncIterator[HttpServed]:
    """The demo model behind HTTP, in this process."""
    engine = AsyncEngine(EngineConfig(**({"num_pages": 512, "page_size": 16, "max_running": 16} | settings)))
    await engine.start()
    below = GrpcServer(engine)
    await below.start(LOCAL)
    try:
        async with beside(below) as (server, address):
            yield HttpServed(server, address)
    finally:
        await below.stop()


@asynccontextmanager
async def beside(
    below: GrpcServer, max_body_bytes: int = 2**20, **options: Any
) -> AsyncIterator[tuple[HttpServer, str]]:
    server = HttpServer(
        below.handler,
        calls=below.limiter.calls,
        max_body_bytes=max_body_bytes,
        check=lambda: None,
        render=lambda: ("text/plain", b"metrics\n"),
        **options,
    )
    bound = bound_socket(LOCAL, "--http")
    await server.start(bound, below.security.tls)
    try:
        yield server, str(LOCAL.with_port(bound.getsockname()[1]))
    finally:
        await server.stop()
