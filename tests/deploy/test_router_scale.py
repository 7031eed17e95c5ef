from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from router import http_server, metrics_of, needs_router, openai_client

pytestmark = [pytest.mark.server, pytest.mark.slow, needs_router]

FLAGS = ["--num-pages", "256", "--max-running", "32", "--max-step-tokens", "128", "--page-size", "16"]
# Odd, because round robin would send each of an even number of prefixes to one worker only.
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


async def test_prompts_go_where_their_prefix_is_cached() -> None:
    aware, blind = await _cached_share("cache_aware"), await _cached_share("round_robin")
    print(json.dumps({"cached_share": {"cache_aware": aware, "round_robin": blind}}))
    assert aware > blind, f"cache_aware {aware:.2f}, round_robin {blind:.2f}"
    assert aware > 0.5, f"three of four questions find their prefix: {aware:.2f}"


@dataclass
class Load:
    client: Any
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    open: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    num_begun: int = 0

    async def client_loop(self) -> None:
        while not self.stopping.is_set():
            self.num_begun += 1
            number = self.num_begun
            self.open.add(number)
            try:
                await self._stream(number)
                self.done.add(number)
            except Exception as error:
                self.failed[number] = repr(error)
            finally:
                self.open.discard(number)

    async def _stream(self, number: int) -> None:
        stream = await self.client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": f"Tell me a story about number {number}."}],
            max_tokens=150,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        reason = None
        async for event in stream:
            if event.choices:
                reason = event.choices[0].finish_reason or reason
        assert reason == "length", f"it ended with {reason}"


async def _under_load(end: signal.Signals) -> tuple[Load, set[int], str]:
    async with http_server("--workers", "2", "--policy", "round_robin", "--", *FLAGS) as ready:
        pids = _worker_pids(ready)
        survivor = ready["worker_metrics"].split(",")[1]
        async with openai_client(ready) as client:
            load = Load(client)
            loops = [asyncio.create_task(load.client_loop()) for _ in range(8)]
            await _until(lambda: len(load.done) >= 8)
            opened = set(load.open)
            os.kill(pids[ready["workers"].split(",")[0]], end)
            begun = load.num_begun
            await _until(lambda: len(load.done | load.failed.keys()) >= begun + 24)
            load.stopping.set()
            await asyncio.gather(*loops)
        return load, opened, await metrics_of(survivor)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_worker_that_is_told_to_end_fails_nobody() -> None:
    load, opened, _ = await _under_load(signal.SIGTERM)
    assert opened
    assert not load.failed


async def test_a_worker_that_is_killed_fails_only_what_it_was_serving() -> None:
    load, opened, metrics = await _under_load(signal.SIGKILL)
    assert load.failed.keys() <= opened, f"streams that began later failed: {load.failed}"
    assert len(load.failed) < len(opened), "those of the other worker go on"
    assert len(load.done) >= 24
    for reason in ("abort", "error"):
        assert f'octavo_requests_total{{finish_reason="{reason}"}} 0.0' in metrics
