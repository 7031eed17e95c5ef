from __future__ import annotations

import asyncio
import signal
import urllib.request
from pathlib import Path

import pytest

from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.client.client import Client
from octavo.engine.client.server_process import ServerProcess
from served import collect, eventually

pytestmark = pytest.mark.server

PROMPT = [number * 7 % 200 for number in range(400)]


@pytest.mark.slow
async def test_a_killed_server_s_pages_are_found_by_the_next(tmp_path: Path) -> None:
    flags = ["--num-pages", "64", "--page-size", "16", "--max-running", "4", "--cache-dir", str(tmp_path)]
    short = SamplingParams(max_tokens=4, ignore_eos=True)
    server = ServerProcess(flags)
    await server.start()
    async with Client(server.ready["grpc"]) as client:
        cold = (await collect(client.generate(PROMPT, short)))[0]
        await eventually(lambda: len(list(tmp_path.rglob("*.safetensors"))) >= 25, "25 pages are written")
        endless = client.generate(PROMPT[::-1], SamplingParams(max_tokens=500, ignore_eos=True))
        await anext(endless)
        server.signal(signal.SIGKILL)
        assert await server.wait() == -signal.SIGKILL
    async with ServerProcess(flags) as server, Client(server.ready["grpc"]) as client:
        warm = (await collect(client.generate(PROMPT, short)))[0]
        assert (warm.cached_tokens, warm.token_ids) == (384, cold.token_ids)

        def scrape() -> str:
            with urllib.request.urlopen(f"http://{server.ready['metrics']}/metrics", timeout=10) as reply:
                return str(reply.read().decode())

        metrics = await asyncio.to_thread(scrape)
        assert 'octavo_store_lookups_total{result="hit"} 1.0' in metrics
        assert "octavo_store_loaded_pages_total 24.0" in metrics
