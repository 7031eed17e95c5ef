from __future__ import annotations

import asyncio
import json
import signal
import sys
import urllib.request
from typing import Any

import pytest

from octavo.engine.api.errors import EngineDead, InvalidConfig
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.cli import main
from octavo.engine.client.client import Client
from octavo.engine.client.server_process import ServerProcess
from served import METRIC_NAMES, collect

pytestmark = pytest.mark.server

SMALL = ["--num-pages", "64", "--max-running", "8", "--max-step-tokens", "64"]
PROMPT = "Once upon a time there was"


async def _command(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = await asyncio.to_thread(main, argv)
    out, err = capsys.readouterr()
    return code, out, err


async def _get(address: str, path: str) -> str:
    def get() -> str:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as reply:
            return str(reply.read().decode())

    return await asyncio.to_thread(get)


async def test_a_server_and_everything_that_talks_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    async with ServerProcess([*SMALL, "--kv-format", "bf16/fp4"]) as server:
        assert server.ready.keys() == {"grpc", "metrics", "model", "backend", "kv", "pages"}
        assert (server.ready["model"], server.ready["kv"], server.ready["pages"]) == (
            "demo",
            "bf16/fp4",
            "64",
        )
        server.signal(signal.SIGHUP)  # it has no files to reload, and serves on
        await _check_generate(capsys, server.ready["grpc"])
        await _check_bench(capsys, server.ready["grpc"])
        await _check_metrics(server.ready["metrics"])
        await _check_ports(server)
    assert server.returncode == 0
    assert not server.last_errors, f"a quiet run logs no warning: {list(server.last_errors)}"


async def _check_generate(capsys: pytest.CaptureFixture[str], address: str) -> None:
    results: list[dict[str, Any]] = []
    for where in (["--connect", address], [*SMALL, "--kv-format", "bf16/fp4"]):
        code, out, err = await _command(
            capsys, "generate", PROMPT, "--max-tokens", "8", "--logprobs", "1", "--json", *where
        )
        assert code == 0, err
        results.append(json.loads(out.splitlines()[-1]))
        assert results[-1].keys() == {"outputs", "prompt_tokens", "cached_tokens", "ttft_s", "tokens_per_s"}
    [there, here] = [result["outputs"][0] for result in results]
    assert there["text"] == here["text"]
    assert there["token_ids"] == here["token_ids"]
    assert len(there["logprobs"]) == 8
    code, _, err = await _command(capsys, "generate", PROMPT, "--max-tokens", "9999", "--connect", address)
    assert code == 2
    assert "9999" in err
    assert err.count("\n") == 1


async def _check_bench(capsys: pytest.CaptureFixture[str], address: str) -> None:
    options = ["--requests", "6", "--concurrency", "3", "--prompt-tokens", "70", "--output-tokens", "5"]
    more = ["--shared-prefix-tokens", "64", "--rate", "200", "--json"]
    code, out, err = await _command(capsys, "bench", "serve", "--connect", address, *options, *more)
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result.keys() == {
        "bench", "requests", "failed", "wall_s", "output_tokens_per_s", "total_tokens_per_s",
        "ttft_s", "itl_s", "e2e_s", "cached_tokens",
    }  # fmt: skip
    assert (result["bench"], result["requests"], result["failed"]) == ("serve", 6, 0)
    assert result["output_tokens_per_s"] * result["wall_s"] == pytest.approx(30)
    for key in ("ttft_s", "itl_s", "e2e_s"):
        assert 0 < result[key]["p50"] <= result[key]["p95"] <= result[key]["p99"]
    assert result["cached_tokens"] >= 64, "the shared prefix was never found"
    code, _, err = await _command(
        capsys, "bench", "serve", "--connect", address, "--prompt-tokens", "99999", "--output-tokens", "1"
    )
    assert (code, err.count("\n")) == (2, 1)
    assert "100000 together" in err


async def _check_metrics(address: str) -> None:
    text = await _get(address, "/metrics")
    for name in METRIC_NAMES:
        assert f"\n{name}" in text, f"{name} is missing"
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["octavo_generated_tokens_total"]) > 30
    assert float(values['octavo_kv_pages{state="held"}']) == 0
    assert float(values['octavo_requests_total{finish_reason="length"}']) > 5
    assert float(values['octavo_rejected_requests_total{reason="too_long"}']) == 1
    assert '"ok"' in await _get(address, "/healthz")
    assert '"ok"' in await _get(address, "/readyz")


async def _check_ports(server: ServerProcess) -> None:
    for flag, address in (("--listen", server.ready["grpc"]), ("--metrics", server.ready["metrics"])):
        other = {"--listen": "--metrics", "--metrics": "--listen"}[flag]
        flags = [*SMALL, flag, address, other, "127.0.0.1:0"]
        # The port is checked before the model is loaded, because loading takes long.
        with pytest.raises(InvalidConfig, match=f"{address}.*port is in use.*{flag}"):
            await ServerProcess([*flags, "--model", "./no/such/folder"]).start()
    async with Client(server.ready["grpc"]) as client:
        assert (await client.server_info()).num_running == 0, "the first server is not disturbed"


@pytest.mark.parametrize("end", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
async def test_a_signal_drains_and_exits_0(end: signal.Signals) -> None:
    async with ServerProcess(SMALL) as server, Client(server.ready["grpc"]) as client:
        params = SamplingParams(max_tokens=600, ignore_eos=True)
        deltas = client.generate(PROMPT, params)
        count = len((await anext(deltas)).token_ids)
        server.signal(end)
        with pytest.raises(EngineDead, match="draining"):
            await _send_until_refused(client)
        async for delta in deltas:
            count += len(delta.token_ids)
        assert delta.finish_reason is FinishReason.LENGTH
        assert count == 600
        assert await server.wait() == 0


async def _send_until_refused(client: Client) -> None:
    while True:
        await collect(client.generate("more", SamplingParams(max_tokens=1)))


async def test_a_drain_is_over_after_its_timeout() -> None:
    flags = [*SMALL, "--drain-timeout", "0"]
    async with ServerProcess(flags) as server, Client(server.ready["grpc"]) as client:
        deltas = client.generate(PROMPT, SamplingParams(max_tokens=1900, ignore_eos=True))
        await anext(deltas)
        server.signal(signal.SIGTERM)
        rest = await collect(deltas)
        assert rest[0].finish_reason is FinishReason.ABORT
        assert await server.wait() == 0


async def test_ctrl_c_ends_generate_quietly() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "octavo.engine.cli", "generate", PROMPT, "--ignore-eos", "--max-tokens", "7000",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        # Shells start background commands with SIGINT ignored, and child processes inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    if not await process.stdout.read(1):
        pytest.fail(f"it never began: {(await process.stderr.read()).decode()}")
    process.send_signal(signal.SIGINT)
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130
    assert errors == b""


async def test_a_model_that_does_not_load_prints_one_line() -> None:
    with pytest.raises(InvalidConfig, match="no/such/folder"):
        await ServerProcess(["--model", "./no/such/folder"]).start()
