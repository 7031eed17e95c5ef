"""HTTP clients: costly bodies, too much, too slow or incomplete requests, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from ..attack import Seen, Target, attack, repeat

Kind: TypeAlias = Callable[[Target, asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"role": "user", "content": "a"}
COSTLY: tuple[tuple[str, Any], ...] = (  # deep nesting, many keys, numbers or samples
    (COMPLETIONS, b"[" * 100_000),
    (CHAT, b'{"messages":' + b'[{"content":' * 20_000),
    (COMPLETIONS, {f"k{at}": at for at in range(50_000)}),
    (COMPLETIONS, {"prompt": ["a"] * 50_000, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": "a", "n": 64, "max_tokens": 300, "stream": True}),
    (CHAT, {"messages": [HI] * 20_000}),
    (CHAT, {"messages": [], "tools": [{"type": "function"}] * 20_000}),
    ("/v1/embeddings", {"input": [[1] * 100] * 2_000}),
    ("/detokenize", {"tokens": [7] * 1_000_000}),
    ("/v1/rerank", {"query": "q" * 900_000, "documents": ["d"] * 1_000, "yes": "a", "no": "b"}),
    ("/tokenize", {"prompt": "\ufffd" * 100_000}),
    (COMPLETIONS, b'{"prompt": "a", "logit_bias": {' + b'"1":1,' * 50_000 + b'"2":1}}'),
    (COMPLETIONS, {"prompt": [7] * 3000, "n": 64, "max_tokens": 1, "logprobs": 20, "echo": True}),
    (CHAT, {"messages": [HI], "n": 64, "max_tokens": 400, "logprobs": True, "top_logprobs": 20}),
)


def _head(target: Target, *headers: str, path: str = COMPLETIONS) -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"authorization: Bearer {target.token}",
        *headers,
    )
    return "\r\n".join((*lines, "", "")).encode()


def _request(target: Target, body: Any, *headers: str, path: str = COMPLETIONS) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _head(target, f"content-length: {len(data)}", *headers, path=path) + data


def _connect(
    address: str, **options: Any
) -> Coroutine[None, None, tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.rpartition(":")
    return asyncio.open_connection(host, int(port), **options)


@attack("http-bodies", "H2")
async def send_costly_bodies(target: Target, seen: Seen) -> None:
    requests = itertools.cycle(
        [_request(target, body, "connection: close", path=path) for path, body in COSTLY]
    )

    async def call(_stub: Any, _: random.Random, left: float) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await _connect(target.http)
            writer.write(next(requests))
            answer = await asyncio.wait_for(reader.read(), left + 5)
            writer.close()
            seen[f"HTTP {answer[9:12].decode()}"] += 1

    await repeat(target, 16, call)


@attack("http-states", "H3", setup="recurrent")
async def leave_streams(target: Target, seen: Seen) -> None:
    """Stream from a recurrent model with a small pool, and disconnect at random."""

    async def call(_stub: Any, rng: random.Random, *_: Any) -> None:
        body = {
            "prompt": f"story {rng.randrange(5)} " * rng.randrange(5, 60),
            "max_tokens": rng.randrange(20, 300),
            "n": rng.choice((1, 1, 2)),
            "ignore_eos": True,
            "stream": True,
        }
        with contextlib.suppress(OSError):
            reader, writer = await _connect(target.http, limit=2**24)
            writer.write(_request(target, body))
            with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
                await asyncio.wait_for(reader.readuntil(b"[DONE]"), rng.random() * 2)
                seen["whole"] += 1
            writer.transport.abort()
            seen["streams"] += 1

    await repeat(target, 12, call)


@attack("scrapers", "metrics")
async def scrape(target: Target, seen: Seen) -> None:
    token = f"authorization: Bearer {target.token}"
    request = f"GET /metrics HTTP/1.1\r\nhost: x\r\n{token}\r\nconnection: close\r\n\r\n".encode()
    addresses = itertools.cycle([target.metrics, target.http])

    async def call(*_: Any) -> None:
        try:
            reader, writer = await _connect(next(addresses))
            writer.write(request)
            answer = await reader.read()
            writer.close()
        except OSError:
            seen["not answered"] += 1
        else:
            seen[answer[9:12].decode()] += 1

    await repeat(target, 30, call)


@attack("http-clients", "H1")
async def send_oddly(target: Target, seen: Seen) -> None:
    async def counted(kind: Kind) -> None:
        try:
            reader, writer = await _connect(target.http)
        except OSError:
            seen["not connected"] += 1
            return
        with contextlib.suppress(ConnectionError):
            await kind(target, reader, writer)
        writer.close()
        seen["closed"] += 1

    await asyncio.gather(*(counted(kind) for kind in KINDS for _ in range(60)))


def _long(target: Target, **fields: object) -> bytes:
    body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
    return _request(target, body | fields)


async def _slow_headers(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for character in _head(target)[: round(target.seconds * 2)]:
        writer.write(bytes((character,)))
        await writer.drain()
        await asyncio.sleep(0.5)


async def _slow_body(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_long(target)[:-20])
    await asyncio.sleep(target.seconds)


async def _giant_body(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _chunked(target, writer, b"10000\r\n" + b"[" * 2**16 + b"\r\n")


async def _small_chunks(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _chunked(target, writer, b"1\r\n \r\n" * 10_000)


async def _trailers(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _chunked(target, writer, b"a: bcd\r\n" * 10_000, first=b"1\r\n \r\n0\r\n")


async def _chunked(target: Target, writer: asyncio.StreamWriter, piece: bytes, first: bytes = b"") -> None:
    writer.write(_head(target, "transfer-encoding: chunked") + first)
    for _number in range(200):
        writer.write(piece)
        await writer.drain()


async def _half_body(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_head(target, "content-length: 1000000") + b" " * 999_999)
    await asyncio.sleep(target.seconds)


async def _pipelined(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_long(target) * 500)
    await writer.drain()
    await asyncio.sleep(target.seconds)


async def _never_read(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(_long(target, logprobs=20, n=2))
    await asyncio.sleep(target.seconds)


async def _half_closed(target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_long(target))
    writer.write_eof()
    await asyncio.wait_for(reader.read(2**16), target.seconds + 5)


async def _leaves(target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_long(target))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reader.read(100), 5)
    writer.transport.abort()


KINDS: tuple[Kind, ...] = (
    _slow_headers, _slow_body, _giant_body, _small_chunks, _trailers, _half_body, _pipelined, _never_read,
    _half_closed, _leaves,
)  # fmt: skip
