from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from engines import Gate
from fakes import FakeCore, small_config
from http_served import HttpServed, http_served, parse_reply
from octavo.engine.grpc.security import Security, TlsFiles
from octavo.engine.http import connection, exchange
from octavo.engine.http.sampling import MAX_ITEMS
from octavo.engine.http.turns import MAX_PARTS
from served import all_idle, eventually

pytestmark = pytest.mark.server

LONG: dict[str, Any] = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def raw(body: Any, *, path: str = COMPLETIONS, more: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{more}"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def served_still(served: HttpServed) -> None:
    reply = await served.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 3})
    assert reply.status == 200, reply.body


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("half", [True, False], ids=["half-closed", "closed"])
async def test_a_client_that_leaves_frees_its_pages(streams: bool, half: bool) -> None:
    gate = Gate()
    async with http_served(gate=gate) as served:
        reader, writer = await served.connect()
        writer.write(raw(LONG | {"stream": streams}))
        gate.allow(4)
        assert served.below is not None
        engine = served.below.engine
        await eventually(lambda: engine.gauges().num_running == 1, "the request runs")
        if half:
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 20)
        else:
            writer.close()
        await eventually(lambda: served.below.server.handler.num_active == 0, "it is given up")  # type: ignore[union-attr]
        gate.open()
        await eventually(lambda: all_idle(engine), "its pages are idle")
        writer.close()
        await served_still(served)


async def test_a_large_body_is_refused_by_its_declared_size() -> None:
    async with http_served(max_body_bytes=1000) as served:
        reader, writer = await served.connect()
        writer.write(raw({}, more="").replace(b"content-length: 2", b"content-length: 999999999"))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert b" 413 " in head
        writer.close()
        await served_still(served)


@pytest.mark.parametrize("kind", ["messages", "parts", "tools"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_conversation_has_a_bounded_number_of_parts(path: str, kind: str) -> None:
    def body(count: int) -> dict[str, Any]:
        text = "input_text" if path == "/v1/responses" else "text"
        whole, part = {"role": "user", "content": "a"}, {"type": text, "text": "a"}
        messages: list[Any] = [whole] * count if kind == "messages" else [whole]
        if kind == "parts":
            messages = [{"role": "user", "content": [part] * (count - 1)}]
        tool_of: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"type": "function", "function": {"name": "f"}},
            "/v1/messages": {"name": "f", "input_schema": {"type": "object"}},
            "/v1/responses": {"type": "function", "name": "f"},
        }
        tools = [tool_of[path]] * (count - 1)
        named = {"input": messages} if path == "/v1/responses" else {"messages": messages, "max_tokens": 2}
        return {"model": "fake", **named, **({"tools": tools} if kind == "tools" else {})}

    async with http_served() as served:
        for count, refused in ((MAX_PARTS, False), (MAX_PARTS + 1, True)):
            reply = await served.post(path, body(count))
            assert (f"at most {MAX_PARTS} messages, parts and tools" in reply.body.decode()) == refused


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "stop"])
async def test_lists_of_sampling_over_http_have_a_bounded_number(name: str) -> None:
    async with http_served() as served:
        for count, refused in ((MAX_ITEMS, False), (MAX_ITEMS + 1, True)):
            texts = [str(token) for token in range(count)]
            items = {
                "logit_bias": dict.fromkeys(texts, 1),
                "stop": texts,
                "stop_token_ids": list(range(count)),
            }
            reply = await served.post("/v1/completions", {"prompt": "a", name: items[name]})
            assert (f"at most {MAX_ITEMS} items" in reply.body.decode()) == refused


async def test_bodies_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.http.server.BODIES", 1)
    async with http_served(max_body_bytes=1000) as served:
        _, first = await served.connect()
        first.write(raw(LONG | {"prompt": "x" * 700})[:-5])
        await eventually(lambda: served.server.services.bodies.holders.total > 500, "most of a body is there")
        reply = await served.post(COMPLETIONS, {"prompt": "y" * 700})
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        first.close()
        await eventually(lambda: served.server.services.bodies.holders.total == 0, "it is forgotten")
        await served_still(served)


@pytest.mark.parametrize("piece", [b"1\r\n \r\n", b"0\r\n" + b"a: b\r\n" * 500], ids=["chunks", "trailers"])
@pytest.mark.parametrize("has_token", [True, False], ids=["token", "no-token"])
async def test_small_chunks_and_trailers_end_the_connection(
    tmp_path: Path, piece: bytes, has_token: bool
) -> None:
    (tmp_path / "tokens").write_text("alice-0123456789\n")
    head = raw({}, more="authorization: Bearer alice-0123456789\r\n" * has_token)[:-2]
    async with http_served(security=Security(token_file=tmp_path / "tokens")) as served:
        reader, writer = await served.connect()
        writer.write(head.replace(b"content-length: 2", b"transfer-encoding: chunked") + piece)
        with contextlib.suppress(ConnectionError):
            for _ in range(2 * connection.MAX_PIECES):
                writer.write(b"1\r\n \r\n" if piece[:1] == b"1" else b"a: b\r\n" * 10)
                await writer.drain()
            await asyncio.wait_for(reader.read(), 10)
        await eventually(lambda: served.server.num_connections == 0, "it is closed")
        writer.close()


async def test_half_bodies_of_a_tenant_leave_space_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.engine.http.server.BODIES", 2)
    (tmp_path / "tokens").write_text("alice alice-0123456789\nmallory mallory-0123456789\n")
    body = json.dumps({"prompt": "abc", "max_tokens": 3}).encode() + b" " * 700
    async with http_served(security=Security(token_file=tmp_path / "tokens"), max_body_bytes=1000) as served:
        _, first = await served.connect()
        head = raw({}, more="authorization: Bearer mallory-0123456789\r\n").replace(
            b"length: 2", b"length: 900"
        )
        first.write(head + b" " * 700)
        await eventually(lambda: served.server.services.bodies.holders.total > 500, "most of a body is there")
        for tenant, status in (("mallory", 429), ("alice", 200)):
            headers = {"authorization": f"Bearer {tenant}-0123456789"}
            assert (await served.post(COMPLETIONS, body, **headers)).status == status
        first.close()


async def test_whole_answers_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.http.server.ANSWER_BYTES", 2000)
    async with http_served() as served:
        reply = await served.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 20, "n": 8, "logprobs": 2})
        assert (reply.status, "an answer must have at most 2000 bytes" in reply.body.decode()) == (400, True)
        assert served.server.services.answers.holders.total == 0
        echoed = {"prompt": "abc" * 9, "max_tokens": 1, "n": 8, "logprobs": 2, "echo": True}
        assert served.below is not None
        calls = served.below.server.handler.num_prompt_tokens
        assert (await served.post(COMPLETIONS, echoed)).status == 400
        assert served.below.server.handler.num_prompt_tokens == calls, "it was computed before"
        await served_still(served)


async def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_TIMEOUT_S", 0.05)
    async with http_served() as served:
        reader, writer = await served.connect()
        writer.write(raw(LONG)[:-5])
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert b" 408 " in head
        writer.close()


async def test_headers_that_do_not_come_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_TIMEOUT_S", 0.05)
    monkeypatch.setattr("octavo.engine.http.server.SWEEP_S", 0.02)
    async with http_served() as served:
        reader, writer = await served.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nslow: ")
        assert await asyncio.wait_for(_rest(reader), 20) == b""
        writer.close()
        await served_still(served)


@pytest.mark.parametrize("line", [b"x: " + b"y" * 100, b"y" * 100], ids=["many", "one"])
async def test_endless_headers_are_cut_off(line: bytes) -> None:
    async with http_served() as served:
        reader, writer = await served.connect()
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        if line.startswith(b"x"):
            writer.write((line + b"\r\n") * 1000)
        else:
            writer.write(b"x: " + line * 1000)
        answer = await asyncio.wait_for(_rest(reader), 20)
        assert answer == b"" or b" 400 " in answer
        writer.close()
        await served_still(served)


async def test_a_flood_of_pipelined_requests_is_cut_off() -> None:
    async with http_served(gate=(gate := Gate())) as served:
        reader, writer = await served.connect()
        writer.write(raw(LONG) * 50)
        assert await asyncio.wait_for(_rest(reader), 20) == b""
        gate.open()
        writer.close()
        await served_still(served)


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with http_served() as served:
        reader, writer = await served.connect()
        writer.write(
            raw({"prompt": "a", "max_tokens": 2})
            + raw({"prompt": "a", "max_tokens": 3}, more="connection: close\r\n")
        )
        first = await reader.readuntil(b"\r\n\r\n")
        size = int(first.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        one = json.loads(await reader.readexactly(size))
        two = parse_reply(await reader.read()).json
        assert [answer["usage"]["completion_tokens"] for answer in (one, two)] == [2, 3]
        writer.close()


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    async with http_served(config=small_config(num_pages=1024), write_timeout_s=0.3) as served:
        assert served.below is not None
        handler = served.below.server.handler
        handler.writer.timeout_s = 0.3
        assert served.server._server is not None
        for listener in served.server._server.sockets:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        host, port = served.address.rsplit(":", 1)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            body = LONG | {"stream": True, "max_tokens": 1500, "n": 8, "logprobs": 20}
            client.sendall(raw(body, more="connection: close\r\n"))
            await eventually(lambda: handler.num_active == 1, "it runs")
            await served_still(served)
            await eventually(lambda: handler.num_active == 0, "it ends")
            await asyncio.sleep(1.0)
            client.setblocking(False)
            found = b""
            with contextlib.suppress(ConnectionError):
                while piece := await asyncio.get_running_loop().sock_recv(client, 2**16):
                    found += piece
            assert len(found) > 1000
            assert b"[DONE]" not in found


async def test_the_oldest_idle_connections_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.http.server.SWEEP_S", 0.02)
    async with http_served(max_connections=20) as served:
        pairs = [await served.connect() for _ in range(40)]
        await eventually(lambda: served.server.num_connections <= 20, "half of them are closed")
        await served_still(served)
        for _, writer in pairs:
            writer.close()


async def test_only_json_is_read() -> None:
    async with http_served() as served:
        reply = await served.ask("POST", COMPLETIONS, b"{}", {"content-type": "text/plain"})
        assert reply.status == 415
        assert "application/json" in reply.json["error"]["message"]


async def test_tokens_are_checked_before_the_body(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("alice alice-token\nbob bob-token\n")
    async with http_served(security=Security(token_file=tmp_path / "tokens")) as served:
        reader, writer = await served.connect()
        writer.write(raw(LONG)[:-20])
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert b" 401 " in head
        assert b"www-authenticate: Bearer" in head
        writer.close()
        body = {"prompt": "abc", "max_tokens": 2}
        wrong = await served.post(COMPLETIONS, body, authorization="Bearer x")
        right = await served.post(COMPLETIONS, body, authorization="Bearer alice-token")
        assert (wrong.status, right.status) == (401, 200)
        assert wrong.json["error"]["code"] == "invalid_api_key"
        for path, status in (("/health", 200), ("/v1/models", 401), ("/metrics", 401)):
            assert (await served.get(path)).status == status, path


def tls_files(folder: Path) -> tuple[TlsFiles, ssl.SSLContext]:
    ca = trustme.CA()
    certificate = ca.issue_cert("127.0.0.1")
    files = TlsFiles(cert=folder / "cert.pem", key=folder / "key.pem")
    certificate.private_key_pem.write_to_path(str(files.key))
    certificate.cert_chain_pems[0].write_to_path(str(files.cert))
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return files, context


async def test_tls_is_that_of_grpc(tmp_path: Path) -> None:
    files, context = tls_files(tmp_path)
    async with http_served(security=Security(tls=files)) as served:
        host, port = served.address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert parse_reply(await reader.read()).status == 200
        writer.close()


async def test_a_full_server_says_when_to_come_again() -> None:
    gate = Gate()
    async with http_served(gate=gate, config=small_config(max_running=1, max_waiting=1)) as served:
        assert served.below is not None
        waits = [asyncio.create_task(served.post(COMPLETIONS, LONG)) for _ in range(2)]
        engine = served.below.engine
        await eventually(lambda: served.below.server.handler.num_active == 2, "two are there")  # type: ignore[union-attr]
        reply = await served.post(COMPLETIONS, LONG)
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        assert reply.json["error"]["type"] == "rate_limit_error"
        gate.open()
        assert [(await wait).status for wait in waits] == [200, 200]
        await eventually(lambda: all_idle(engine), "all is idle")


async def test_a_failing_request_is_an_error_in_its_stream() -> None:
    async with http_served(FakeCore(poison=98)) as served:
        whole = await served.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 4})
        assert whole.status == 500
        stream = await served.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 4, "stream": True})
        assert b"error" in stream.body


async def _rest(reader: asyncio.StreamReader) -> bytes:
    found = b""
    try:
        while piece := await reader.read(2**16):
            found += piece
    except ConnectionError:
        pass
    return found
