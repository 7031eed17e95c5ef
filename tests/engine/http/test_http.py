"""``octavo serve --http``: the router as a child of the server, driven by the openai package."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.engine.api.address import Address
from octavo.engine.api.errors import EngineDead, InvalidConfig, Unauthenticated
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.cli import main
from octavo.engine.client.client import Client
from octavo.engine.client.credentials import ClientCredentials
from octavo.engine.client.server_process import ServerProcess
from octavo.engine.http.options import HttpOptions
from octavo.engine.http.router import MAX_FAILURES, Router
from openai_checks import (
    chat,
    check_chat,
    check_choices,
    check_refusals,
    check_stream,
    check_structured,
    check_tools,
)
from router import needs_router, openai_client
from served import collect, eventually, eventually_async

pytestmark = pytest.mark.server

SMALL = ["--num-pages", "256", "--max-running", "16", "--max-step-tokens", "128", "--page-size", "16"]
HTTP = ["--http", "127.0.0.1:0"]
LOCAL = Address("127.0.0.1", 0)


def _router_of(server: ServerProcess) -> psutil.Process:
    """The server's child that is the router."""
    children = psutil.Process(server.pid).children()  # helpers of grammars are others
    (router,) = (child for child in children if not _has_ended(child) and "smg" in child.name())
    return router


def _has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def _status(url: str, *, method: str = "GET", key: str | None = None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


@needs_router
async def test_one_command_serves_the_openai_package() -> None:
    import openai

    async with ServerProcess([*SMALL, *HTTP]) as server:
        assert server.ready.keys() == {"grpc", "http", "metrics", "model", "backend", "kv", "pages"}
        async with openai_client(server.ready) as client:
            assert [model.id async for model in client.models.list()] == ["demo"]
            await check_chat(client)
            await check_stream(client)
            await check_choices(client)
            await check_structured(client)
            await check_tools(client)
            await check_refusals(client, openai)
            await _check_closed(server.ready["http"])
            await _check_restart(server, client)
            await _check_drain(server, client)
    assert server.returncode == 0


async def _check_closed(http: str) -> None:
    """The router's own API, which could send clients' prompts to another worker."""
    for path, method in (
        ("workers", "GET"),
        ("workers", "POST"),
        ("flush_cache", "POST"),
        ("get_loads", "GET"),
    ):
        assert await asyncio.to_thread(_status, f"http://{http}/{path}", method=method) == 401, path


async def _check_restart(server: ServerProcess, client: Any) -> None:
    router = _router_of(server)
    router.kill()

    async def serves() -> bool:
        try:
            return bool((await chat(client, max_tokens=2)).usage.completion_tokens)
        except Exception:  # nobody listens, or not yet for long
            return False

    await eventually_async(serves, "another router takes its place, on the same port", within=60)
    assert _router_of(server).pid != router.pid


async def _check_drain(server: ServerProcess, client: Any) -> None:
    """A stream that runs is finished on both sides of the router, and nothing is left of it."""
    router = _router_of(server)
    stream = await chat(client, stream=True, max_tokens=300, extra_body={"ignore_eos": True})
    events = aiter(stream)
    await anext(events)
    server.signal(signal.SIGTERM)
    rest = [event async for event in events]
    assert [e.choices[0].finish_reason for e in rest if e.choices][-1] == "length"
    assert await server.wait() == 0
    assert _has_ended(router)


@needs_router
async def test_names_a_key_and_a_template_of_the_operators(tmp_path: Path) -> None:
    import openai

    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}Q: {{ message['content'] }} A:{% endfor %}")
    flags = [
        "--served-model-name",
        "ledger",
        "old-name",
        "--chat-template",
        str(template),
        "--api-key",
        "sk-1",
    ]
    async with ServerProcess(["demo", *SMALL, *HTTP, *flags]) as server:
        assert server.ready["model"] == "ledger"
        async with openai_client(server.ready) as client:
            with pytest.raises(openai.AuthenticationError):
                await chat(client, model="ledger", max_tokens=1)
            client.api_key = "sk-1"
            assert [model.id async for model in client.models.list()] == ["ledger"]
            plain = await client.completions.create(
                model="ledger", prompt="Q: hello A:", temperature=0, max_tokens=4
            )
            messages = [{"role": "user", "content": "hello"}]
            for name in ("ledger", "old-name"):
                answer = await chat(client, model=name, messages=messages, max_tokens=4)
                assert answer.usage.prompt_tokens == plain.usage.prompt_tokens, "the template is in use"
                assert answer.choices[0].message.content == plain.choices[0].text
        router = _router_of(server)
        server.signal(signal.SIGKILL)
        await eventually(lambda: _has_ended(router), "no router outlives its server")
        await server.wait()


async def test_a_key_without_http_is_one_of_grpc(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-1")
    async with ServerProcess([*SMALL, "--api-key", "sk-1"]) as server:
        async with Client(server.ready["grpc"]) as client:
            with pytest.raises(Unauthenticated):
                await collect(client.generate("hello", SamplingParams(max_tokens=1)))
        async with Client(server.ready["grpc"], ClientCredentials(token_file=key)) as client:
            assert await collect(client.generate("hello", SamplingParams(max_tokens=1)))


async def test_a_router_that_always_ends_is_given_up() -> None:
    options = HttpOptions(listen=LOCAL, metrics=LOCAL)
    ends = (sys.executable, "-c", "raise SystemExit(3)")
    router = Router(options, LOCAL, model="demo", grace_s=0.0, launcher=ends)
    with pytest.raises(EngineDead, match=f"{MAX_FAILURES} times"):
        await router.start()
    await router.stop()
    assert router.num_restarts == MAX_FAILURES - 1


@pytest.mark.parametrize("by_kernel", [True, False], ids=["by the kernel", "by a watcher"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_server(end: signal.Signals, by_kernel: bool) -> None:
    """With a sleeper in the place of the router: what ends it must need nothing of the router."""
    if by_kernel and sys.platform != "linux":
        pytest.skip("only Linux kernels do it")
    child = f"""
        import json, os, sys, time
        from octavo.engine.http import launcher
        launcher.end_with_parent(int(sys.argv[1]), by_kernel={by_kernel})
        assert json.loads(launcher._read_line(0)) == ["options"]
        print(os.getpid(), flush=True)
        time.sleep(600)
    """
    parent = f"""
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", {textwrap.dedent(child)!r}, str(os.getpid())],
                                 stdin=subprocess.PIPE, start_new_session=True)
        child.stdin.write(b'["options"]\\n')
        child.stdin.flush()
        time.sleep(600)
    """
    server = subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent)], stdout=subprocess.PIPE)
    assert server.stdout is not None
    with server.stdout:
        router = psutil.Process(int(server.stdout.readline()))
        watchers = router.children()
        assert len(watchers) == (not by_kernel)
        server.send_signal(end)
        server.wait()
        gone, alive = psutil.wait_procs([router, *watchers], timeout=30)
    assert not [process for process in alive if not _has_ended(process)], gone


def test_without_the_router_there_is_one_line_with_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "smg", None)  # as if it were not installed
    assert main(["serve", *HTTP, "--listen", "127.0.0.1:0"]) == 2
    _, err = capsys.readouterr()
    assert "octavo[http]" in err
    assert err.count("\n") == 1


@needs_router
async def test_a_port_in_use_is_told_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(InvalidConfig, match=f"{taken}.*port is in use.*--http"):
            await ServerProcess(["--http", taken, "--model", "./no/such/folder"]).start()


HTTP_WRONG = {
    "two addresses": (["--http", "127.0.0.1:1", "--port", "2"], "--port"),
    "port": (["--port", "x"], "port must"),
    "tokens of gRPC": ([*HTTP, "--auth-token-file", "x"], "--auth-token-file"),
    "an open gRPC": ([*HTTP, "--api-key", "k", "--listen", "0.0.0.0:0"], "--listen"),
    "half of TLS": ([*HTTP, "--ssl-certfile", "x"], "--ssl-keyfile"),
    "no such certificate": ([*HTTP, "--ssl-certfile", "x", "--ssl-keyfile", "y"], "x is no file"),
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
