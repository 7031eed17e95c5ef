from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.server,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="ray is not installed: docs/guides/ray.md has the command",
    ),
]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEXTS = [f"Ledger {n}. " + f"Petra Sorel lives in house {n} by the harbour. " * 8 for n in range(3)]


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # sockets have short paths
        yield os.environ | {
            "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "100",
        }  # fmt: skip


def test_ray_data_answers_every_row_once(tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "ray_data.py", tmp_path],
        env=environment, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "128 rows of 128 MiB through 100 MiB" in done.stdout
    rows = [json.loads(line) for file in tmp_path.glob("*.json") for line in file.read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == list(range(128))
    assert all(row["answer"] for row in rows)
    assert len({row["engine"] for row in rows}) == 2
    assert sum(row["cached_tokens"] for row in rows) > 0.5 * sum(row["prompt_tokens"] for row in rows)


async def test_ray_serve_routes_by_prefix_and_adds_replicas(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = await asyncio.create_subprocess_exec(
        sys.executable, EXAMPLES / "ray_serve.py", "--port", str(port), "--max-replicas", "2",
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert server.stdout is not None
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

    async def ask(text: str, num_tokens: int) -> tuple[str, str, float]:
        answer = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": text}], max_tokens=num_tokens,
            temperature=0, extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens or 0
        content, replica = answer.choices[0].message.content, answer.system_fingerprint
        return content or "", replica or "", cached / answer.usage.prompt_tokens

    try:
        async with asyncio.timeout(200):
            async for line in server.stdout:
                if line.startswith(b"ready:"):
                    break
            expected = {text: (await ask(text, 200))[0] for text in TEXTS}
            replicas: set[str] = set()
            while len(replicas) < 2:
                for text, answer in zip(
                    4 * TEXTS, await asyncio.gather(*(ask(text, 200) for text in 4 * TEXTS)), strict=True
                ):
                    assert answer[0] == expected[text]
                    replicas.add(answer[1])
            questions = [f"{text} Question {n}" for text in TEXTS for n in range(3)]
            shares = [(await ask(question, 4))[2] for question in questions]
            assert sum(shares) > 0.5 * len(shares)
            server.terminate()
            assert await server.wait() == 0
    finally:
        await client.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        await server.wait()
