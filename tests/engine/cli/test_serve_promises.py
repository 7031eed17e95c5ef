from __future__ import annotations

import asyncio
import json
import urllib.request

import pytest

from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.cli import main
from octavo.engine.client.client import Client
from octavo.engine.client.server_process import ServerProcess
from served import collect

pytestmark = pytest.mark.server

SMALL = ["--num-pages", "64", "--max-running", "8", "--max-step-tokens", "64"]
LOAD = ["--requests", "6", "--prompt-tokens", "70", "--output-tokens", "5", "--json"]
NEVER, ALWAYS = "1e-6", "1e9"  # milliseconds


def metrics(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def goodput(capsys: pytest.CaptureFixture[str], address: str, *slo: str) -> tuple[int, float, float]:
    code = await asyncio.to_thread(main, ["bench", "serve", "--connect", address, *LOAD, "--slo", *slo])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "goodput" in out
    result = json.loads(out.splitlines()[-1])
    assert (result["requests"], result["failed"]) == (6, 0)
    return result["good_requests"], result["goodput"], result["wall_s"]


@pytest.mark.parametrize("fairness", [pytest.param("fcfs", marks=pytest.mark.slow), "dlpm"])
async def test_promises_of_a_server(capsys: pytest.CaptureFixture[str], fairness: str) -> None:
    shares = [] if fairness == "fcfs" else ["--tenant-weights", "alice=2,batch=0.5"]
    targets = ["--target-itl", "150", "--fairness", fairness, *shares]
    async with ServerProcess([*SMALL, *targets]) as server:
        good, rate, wall_s = await goodput(capsys, server.ready["grpc"], f"ttft:{ALWAYS}", f"itl:{ALWAYS}")
        assert good == 6
        assert rate == pytest.approx(6 / wall_s)
        # No condition on ITL: a slow client may receive all tokens in one message.
        assert (await goodput(capsys, server.ready["grpc"], f"ttft:{NEVER}", f"itl:{ALWAYS}"))[0] == 0
        async with Client(server.ready["grpc"]) as client:
            own = SamplingParams(max_tokens=3, ignore_eos=True, target_itl=50.0, target_ttft=float(ALWAYS))
            assert len((await collect(client.generate([3] * 70, own)))[0].token_ids) == 3
        found = metrics(server.ready["metrics"])
    assert found["octavo_step_predicted_seconds_count"] == found["octavo_step_seconds_count"] > 0
    assert found["octavo_step_predicted_seconds_sum"] > 0


@pytest.mark.slow
async def test_without_a_target_nothing_is_predicted() -> None:
    async with ServerProcess([*SMALL, "--target-itl", "off"]) as server:
        async with Client(server.ready["grpc"]) as client:
            await collect(client.generate([3] * 70, SamplingParams(max_tokens=3)))
        found = metrics(server.ready["metrics"])
    assert found["octavo_step_seconds_count"] > found["octavo_step_predicted_seconds_count"] == 0
