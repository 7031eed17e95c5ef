from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from octavo.engine.client.server_process import ServerProcess
from router import get, http_server, metrics_of, needs_router, openai_client
from served import eventually_async

pytestmark = [pytest.mark.server, pytest.mark.slow, needs_router]

FLAGS = ["--num-pages", "256", "--max-running", "32", "--max-step-tokens", "128", "--page-size", "16"]
# Odd, because round robin would send each prefix to one worker only if their number were even.
NUM_PREFIXES, NUM_QUESTIONS = 11, 4


def _worker_pids(ready: dict[str, str]) -> dict[str, int]:
    found = {}
    for child in psutil.Process(int(ready["pid"])).children():
        for connection in child.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found[f"127.0.0.1:{connection.laddr.port}"] = child.pid
    return {address: found[address] for address in ready["workers"].split(",")}


async def _cached_share(policy: str) -> float:
    async with http_server("--workers", "2", "--policy", policy, "--", *FLAGS) as ready:
        client = openai_client(ready)

        async def one(prefix: int, question: int) -> tuple[int, int]:
            system = f"You are number {prefix}. " + f"Mara went to town {prefix} with a lamp. " * 12
            answer = await client.chat.completions.create(
                model="demo",
                messages=[
                    {"role": "system", "content": system},
                    {"role": "user", "content": f"Question {question}?"},
                ],
                max_tokens=8,
                temperature=0,
            )
            details = answer.usage.prompt_tokens_details
            return answer.usage.prompt_tokens, details.cached_tokens if details else 0

        usage = []
        async with client:
            for question in range(NUM_QUESTIONS):
                for first in range(0, NUM_PREFIXES, 4):
                    prefixes = range(first, min(first + 4, NUM_PREFIXES))
                    usage += await asyncio.gather(*(one(prefix, question) for prefix in prefixes))
                await asyncio.sleep(0.5)  # events need time to arrive
    return sum(cached for _, cached in usage) / sum(total for total, _ in usage)


async def test_prompts_are_routed_to_workers_with_their_prefix() -> None:
    aware, blind = await _cached_share("cache_aware"), await _cached_share("round_robin")
    print(json.dumps({"cached_share": {"cache_aware": aware, "round_robin": blind}}))
    assert aware > blind, f"cache_aware {aware:.2f}, round_robin {blind:.2f}"
    assert aware > 0.5, f"three of four questions find their prefix: {aware:.2f}"


PROMPTS = [f"Tell me a story about number {number}." for number in range(24)]
NUM_TOKENS = 96


@dataclass
class Load:
    """Clients that stream greedy answers to PROMPTS; ``wanted`` has the answers of an undisturbed fleet."""

    client: Any
    wanted: dict[str, str] = field(default_factory=dict)
    stopping: bool = False
    open: dict[int, int] = field(default_factory=dict)  # number of messages by request
    num_done: int = 0
    failed: dict[int, int] = field(default_factory=dict)
    num_begun: int = 0

    async def start(self) -> None:
        texts = await asyncio.gather(*(self._stream(0, prompt) for prompt in PROMPTS))
        self.wanted = dict(zip(PROMPTS, texts, strict=True))
        self.loops = [asyncio.create_task(self._loop()) for _ in range(8)]
        await _until(lambda: self.num_done >= 8)

    async def more(self, count: int) -> None:
        wanted = self.num_begun + count
        await _until(lambda: self.num_done + len(self.failed) >= wanted or self._ended)

    async def stop(self) -> None:
        self.stopping = True
        await asyncio.gather(*self.loops)

    @property
    def _ended(self) -> bool:
        return any(loop.done() for loop in self.loops)

    async def _loop(self) -> None:
        import openai

        while not self.stopping:
            self.num_begun += 1
            number, prompt = self.num_begun, PROMPTS[self.num_begun % len(PROMPTS)]
            try:
                text = await self._stream(number, prompt)
                assert text == self.wanted[prompt], f"{text!r} is not {self.wanted[prompt]!r}"
                self.num_done += 1
            except openai.OpenAIError:
                self.failed[number] = self.open.get(number, 0)
            finally:
                self.open.pop(number, None)

    async def _stream(self, number: int, prompt: str) -> str:
        stream = await self.client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=NUM_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text, reason = "", None
        async for event in stream:
            if event.choices:
                text += event.choices[0].delta.content or ""
                reason = event.choices[0].finish_reason or reason
                self.open[number] = self.open.get(number, 0) + bool(event.choices[0].delta.content)
        assert reason == "length", f"it ended with {reason}"
        return text


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(90):
        while not condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def _fleet() -> AsyncIterator[tuple[dict[str, str], Load]]:
    flags = ["--workers", "2", "--policy", "round_robin", "--", *FLAGS]
    async with http_server(*flags) as ready, openai_client(ready) as client:
        load = Load(client)
        await load.start()
        yield ready, load


async def _status(ready: dict[str, str], worker: str) -> str:
    workers = json.loads(await asyncio.to_thread(get, f"http://{ready['http']}/workers"))["workers"]
    return str(next(each["status"] for each in workers if each["url"] == f"grpc://{worker}"))


async def _idle(worker_metrics: str) -> None:
    async def idle() -> bool:
        text = await metrics_of(worker_metrics)
        return 'octavo_kv_pages{state="held"} 0.0' in text and "octavo_requests_running 0.0" in text

    await eventually_async(idle, f"every page of {worker_metrics} is idle")


async def _requests(worker_metrics: str) -> float:
    lines = (await metrics_of(worker_metrics)).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("octavo_requests_total{"))


async def _answered_once(load: Load, left: str, answered_by_other: float) -> None:
    await _idle(left)
    assert await _requests(left) <= load.num_done + len(PROMPTS) - answered_by_other


async def test_a_drained_worker_loses_no_request() -> None:
    async with _fleet() as (ready, load):
        drained, metrics = ready["workers"].split(",")[0], ready["worker_metrics"].split(",")
        pid = _worker_pids(ready)[drained]
        assert load.open
        gone = await _requests(metrics[0])
        os.kill(pid, signal.SIGTERM)
        await load.more(24)
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        await load.stop()
        assert not load.failed
        await _answered_once(load, metrics[1], gone)


async def test_an_added_worker_serves_and_no_request_is_answered_twice() -> None:
    async with _fleet() as (ready, load), ServerProcess(FLAGS) as added:
        body = json.dumps({"url": f"grpc://{added.ready['grpc']}"}).encode()
        await asyncio.to_thread(get, f"http://{ready['http']}/workers", body)
        await load.more(8)
        metrics = [*ready["worker_metrics"].split(","), added.ready["metrics"]]

        async def serves() -> bool:
            return await _requests(metrics[2]) >= 8

        await eventually_async(serves, "the router sends requests to the added worker")
        await load.stop()
        assert not load.failed
        for each in metrics:
            await _idle(each)
        answered = sum([await _requests(each) for each in metrics])
        assert answered == load.num_done + len(PROMPTS)


async def test_a_killed_worker_fails_only_streams_that_it_had_begun() -> None:
    async with _fleet() as (ready, load):
        killed, metrics = ready["workers"].split(",")[0], ready["worker_metrics"].split(",")
        await _until(lambda: sum(map(bool, load.open.values())) >= 4)
        begun = {number for number, messages in load.open.items() if messages}
        gone = await _requests(metrics[0])
        os.kill(_worker_pids(ready)[killed], signal.SIGKILL)

        async def noticed() -> bool:
            return await _status(ready, killed) != "ready"

        await eventually_async(noticed, "the router notices the killed worker")
        await load.more(24)
        await load.stop()
        assert all(load.failed.values()), f"requests without an answer must not fail, got {load.failed}"
        assert len(load.failed) < len(begun), "the other worker's streams go on"
        await _answered_once(load, metrics[1], gone)
