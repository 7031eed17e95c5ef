from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import re
import signal
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.engine import LLM, EngineConfig, SamplingParams
from page_stores import MooncakeMaster, RedisServer, StoreServer

needs_dynamo = pytest.mark.skipif(
    importlib.util.find_spec("dynamo") is None,
    reason="ai-dynamo is not installed: docs/guides/dynamo.md has the commands",
)
LOCAL = {
    "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1", "DYN_LOG": "warn",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1", "DYN_DISCOVERY_BACKEND": "file", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
WORKER = ("octavo.integrations.dynamo", "demo", "--threads", "1", "--num-pages", "192")
TEXTS = [f"Ledger {n}. " + f"Petra Sorel lives in house {n} by the harbour. " * 8 for n in range(6)]
NUM_TOKENS = 300


def free_port() -> int:
    while True:
        port = random.randint(20_000, 32_000)  # DYN_SYSTEM_PORT must be below 32768
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def gauge(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", reply.read().decode(), re.MULTILINE)
    return sum(map(float, found))


def pages(port: int) -> float:
    return gauge(port, "dynamo_component_gpu_cache_usage_percent")


class Fleet:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = (folder / "log").open("w")
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, *module: str, **environment: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *module, stdout=self.log, stderr=self.log,
            env=os.environ | LOCAL | {"DYN_FILE_KV": str(self.folder / "discovery")} | environment,
        )  # fmt: skip
        self.processes.append(process)
        return process

    async def ready(self, client: openai.AsyncOpenAI) -> None:
        async with asyncio.timeout(90):
            workers = "discovery/v1/instances/**/*generate*"
            while len([*self.folder.glob(workers)]) < 2 or not await listed(client):
                assert all(each.returncode is None for each in self.processes), "one ended"
                await asyncio.sleep(0.1)

    async def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self.log.close()


async def listed(client: openai.AsyncOpenAI) -> bool:
    with contextlib.suppress(openai.OpenAIError):
        return bool((await client.models.list()).data)
    return False


class Stream:
    def __init__(self, client: openai.AsyncOpenAI, text: str, *, temperature: float) -> None:
        self.text, self.cached, self.num_prompt = "", 0, 0
        self.task = asyncio.create_task(self._read(client, text, temperature))

    async def _read(self, client: openai.AsyncOpenAI, text: str, temperature: float) -> str:
        more: dict[str, Any] = {"ignore_eos": True, "nvext": {"annotations": [f"max_tokens:{NUM_TOKENS}"]}}
        async for event in await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": text}], stream=True, extra_body=more,
            max_tokens=NUM_TOKENS, temperature=temperature, seed=7, stream_options={"include_usage": True},
        ):  # fmt: skip
            self.text += "".join(choice.delta.content or "" for choice in event.choices)
            if event.usage is not None:
                details = event.usage.prompt_tokens_details
                self.cached = (details and details.cached_tokens) or 0
                self.num_prompt = event.usage.prompt_tokens
        return self.text


@pytest.mark.slow
@pytest.mark.server
@needs_dynamo
async def test_streams_continue_when_a_worker_is_killed(tmp_path: Path) -> None:
    fleet, http, ports = Fleet(tmp_path), free_port(), [free_port(), free_port()]
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{http}/v1", api_key="none", max_retries=0)

    def streams() -> list[Stream]:
        return [Stream(client, text, temperature=0.8 * (n % 2)) for n, text in enumerate(TEXTS)]

    async def texts(open_streams: list[Stream]) -> list[str]:
        async with asyncio.timeout(60):
            return list(await asyncio.gather(*(stream.task for stream in open_streams)))

    try:
        await fleet.start(
            "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(http), "--router-mode", "kv",
            "--migration-limit", "3", "--kv-cache-block-size", "32", "--router-kv-overlap-score-weight", "10",
        )  # fmt: skip
        workers = [await fleet.start(*WORKER, DYN_SYSTEM_PORT=str(port)) for port in ports]
        await fleet.ready(client)
        expected = await texts(streams())
        await asyncio.sleep(1)  # KV events reach the router
        assert await texts(again := streams()) == expected
        assert sum(each.cached for each in again) > 0.8 * sum(each.num_prompt for each in again)

        cut = streams()
        while not all(len(each.text) > 100 for each in cut):
            await asyncio.sleep(0.01)
        busiest = max((0, 1), key=lambda index: pages(ports[index]))
        assert not any(each.task.done() for each in cut)
        workers[busiest].send_signal(signal.SIGKILL)
        assert await texts(cut) == expected
        assert [each.num_prompt for each in cut] == [each.num_prompt for each in again]
        assert gauge(http, "dynamo_frontend_model_migration_total") > 0
        async with asyncio.timeout(10):
            while pages(ports[1 - busiest]):
                await asyncio.sleep(0.05)

        last = streams()
        while not all(each.text for each in last):
            await asyncio.sleep(0.01)
        workers[1 - busiest].send_signal(signal.SIGTERM)
        assert await texts(last) == expected
        assert await asyncio.wait_for(workers[1 - busiest].wait(), 30) == 0
    finally:
        await client.close()
        await fleet.end()


@pytest.mark.slow
@pytest.mark.server
@needs_dynamo
@pytest.mark.parametrize("kind", [RedisServer, MooncakeMaster], ids=lambda kind: kind.scheme)
async def test_prompts_are_computed_on_one_worker_and_answered_by_another(
    tmp_path: Path, kind: type[StoreServer]
) -> None:
    store, fleet, http, ports = kind(tmp_path), Fleet(tmp_path), free_port(), [free_port(), free_port()]
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{http}/v1", api_key="none", max_retries=0)

    async def streams(texts: list[str]) -> list[Stream]:
        started = [Stream(client, text, temperature=0.0) for text in texts]
        async with asyncio.timeout(60):
            await asyncio.gather(*(stream.task for stream in started))
        return started

    try:
        store.start()
        store.wait()
        await fleet.start(
            "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(http), "--router-mode", "kv",
            "--kv-cache-block-size", "32",
        )  # fmt: skip
        workers = [
            await fleet.start(
                *WORKER, "--remote-cache", store.url, "--disaggregation-mode", mode, DYN_SYSTEM_PORT=str(port)
            )
            for mode, port in zip(("prefill", "decode"), ports, strict=True)
        ]
        await fleet.ready(client)
        await asyncio.sleep(3)  # the router connects the two
        with LLM(EngineConfig(model="demo", threads=1, num_pages=192)) as llm:
            params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
            expected = llm.chat([[{"role": "user", "content": text}] for text in TEXTS], params)
        answers = await streams(TEXTS)
        assert [each.text for each in answers] == [each.outputs[0].text for each in expected]
        whole = [(each.num_prompt - 1) // 32 * 32 for each in answers]
        assert min(whole) > 0
        assert [each.cached for each in answers] == whole, (
            "the worker that answers computes the last page only"
        )
        store.stop()
        assert all(each.text for each in await streams([text[::-1] for text in TEXTS]))
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(worker.wait(), 30) == 0
    finally:
        await client.close()
        await fleet.end()
        store.close()
