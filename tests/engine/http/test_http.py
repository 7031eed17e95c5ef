from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from http_served import http_served, openai_client
from octavo.engine.api.errors import InvalidConfig, Unauthenticated
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.cli import main
from octavo.engine.client.client import Client
from octavo.engine.client.credentials import ClientCredentials
from octavo.engine.client.server_process import ServerProcess
from openai_checks import chat, check_chat, check_choices, check_refusals, check_stream, check_structured
from served import collect

pytestmark = pytest.mark.server

SMALL = ["--num-pages", "256", "--max-running", "16", "--max-step-tokens", "128", "--page-size", "16"]
HTTP = ["--http", "127.0.0.1:0"]


async def test_pages_of_allowed_origins_may_ask_from_a_browser() -> None:
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with http_served(allowed_origins=["http://localhost:3000"]) as its:
        for origin, allowed in (("http://localhost:3000", "http://localhost:3000"), ("http://evil", None)):
            asked = await its.ask("OPTIONS", "/v1/chat/completions", b"", {"origin": origin, **preflight})
            assert (asked.status == 200) is (allowed is not None)
            assert asked.headers.get("access-control-allow-origin") == allowed
            found = await its.get("/v1/models", origin=origin)
            assert found.headers.get("access-control-allow-origin") == allowed
    async with http_served() as its:
        asked = await its.ask("OPTIONS", "/v1/chat/completions", b"", {"origin": "http://x", **preflight})
        assert (asked.status, "access-control-allow-origin" in asked.headers) == (405, False)


def test_an_origin_has_no_path(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--http", "127.0.0.1:0", "--allowed-origins", "http://localhost:3000/"]
    assert main(["serve", "demo", *options]) == 2
    assert "without a path" in capsys.readouterr().err


async def test_one_command_serves_the_openai_package() -> None:
    async with ServerProcess([*SMALL, *HTTP]) as server:
        assert server.ready.keys() == {"grpc", "http", "metrics", "model", "backend", "kv", "pages"}
        async with openai_client(server.ready) as client:
            assert [model.id async for model in client.models.list()] == ["demo"]
            await check_chat(client)
            await check_stream(client)
            await check_choices(client)
            await check_structured(client)
            await check_refusals(client, openai)
            children = [child.name() for child in psutil.Process(server.pid).children()]
            assert not [name for name in children if "smg" in name]
            await _check_explained(server, client)
            await _check_drain(server, client)
    assert server.returncode == 0


async def _check_explained(server: ServerProcess, client: Any) -> None:
    answer = await chat(client, max_tokens=1)
    async with Client(server.ready["grpc"]) as beside:
        assert (await beside.cache.explain(answer.id)).request_id == answer.id


async def _check_drain(server: ServerProcess, client: Any) -> None:
    stream = await chat(client, stream=True, max_tokens=300, extra_body={"ignore_eos": True})
    events = aiter(stream)
    await anext(events)
    server.signal(signal.SIGTERM)
    await asyncio.sleep(0.1)
    with pytest.raises((openai.InternalServerError, openai.APIConnectionError)):
        await chat(client, max_tokens=1)
    rest = [event async for event in events]
    assert [e.choices[0].finish_reason for e in rest if e.choices][-1] == "length"
    assert await server.wait() == 0


async def test_names_a_key_and_a_template_of_the_operators(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}Q: {{ message['content'] }} A:{% endfor %}")
    names = ["--served-model-name", "ledger", "old-name"]
    flags = [*names, "--chat-template", str(template), "--api-key", "sk-1"]
    async with ServerProcess(["demo", *SMALL, *HTTP, *flags]) as server:
        assert server.ready["model"] == "ledger"
        async with openai_client(server.ready) as client:
            with pytest.raises(openai.AuthenticationError):
                await chat(client, model="ledger", max_tokens=1)
            client.api_key = "sk-1"
            assert [model.id async for model in client.models.list()] == ["ledger", "old-name"]
            plain = await client.completions.create(
                model="ledger", prompt="Q: hello A:", temperature=0, max_tokens=4
            )
            messages = [{"role": "user", "content": "hello"}]
            for name in ("ledger", "old-name"):
                answer = await chat(client, model=name, messages=messages, max_tokens=4)
                assert plain.usage is not None
                assert answer.usage.prompt_tokens == plain.usage.prompt_tokens, "the template is in use"
                assert answer.choices[0].message.content == plain.choices[0].text
        async with Client(server.ready["grpc"]) as direct:
            with pytest.raises(Unauthenticated):
                await collect(direct.generate("hello", SamplingParams(max_tokens=1)))


@pytest.mark.slow
async def test_a_key_without_http_is_one_of_grpc(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-1")
    async with ServerProcess([*SMALL, "--api-key", "sk-1"]) as server:
        async with Client(server.ready["grpc"]) as client:
            with pytest.raises(Unauthenticated):
                await collect(client.generate("hello", SamplingParams(max_tokens=1)))
        async with Client(server.ready["grpc"], ClientCredentials(token_file=key)) as client:
            assert await collect(client.generate("hello", SamplingParams(max_tokens=1)))


async def test_a_port_in_use_is_reported_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(InvalidConfig, match=f"{taken}.*port is in use.*--http"):
            await ServerProcess(["--http", taken, "--model", "./no/such/folder"]).start()


HTTP_WRONG = {
    "two addresses": (["--http", "127.0.0.1:1", "--port", "2"], "--port"),
    "port": (["--port", "x"], "port must"),
    "half of TLS": ([*HTTP, "--ssl-certfile", "x"], "--tls-key"),
    "no such certificate": ([*HTTP, "--ssl-certfile", "x", "--ssl-keyfile", "y"], "--tls-cert x"),
    "the port of gRPC": (
        ["--http", "127.0.0.1:7", "--listen", "127.0.0.1:7"],
        "--http 127.0.0.1:7 name the same port",
    ),
    "the port of metrics": (["--http", "0.0.0.0:7", "--metrics", "127.0.0.1:7"], "choose different ports"),
    "no certificate": ([*HTTP, "--ssl-certfile", __file__, "--ssl-keyfile", __file__], "PEM certificate"),
    "a message of any size": (["--max-message-size", "9999TiB"], "at most 2147483647 bytes"),
    "key with blanks": (["--api-key", "a b", "--listen", "127.0.0.1:0"], "--api-key"),
}


@pytest.mark.parametrize("name", HTTP_WRONG)
def test_wrong_options_are_one_line(capsys: pytest.CaptureFixture[str], name: str) -> None:
    flags, hint = HTTP_WRONG[name]
    assert main(["serve", *flags]) == 2
    _, err = capsys.readouterr()
    assert err.count("\n") == 1, err
    assert hint in err
    assert os.sep + "root" not in err
