"""The SMG router in front of real workers, started like ``make serve-http``."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "router" / "serve_http.py"
SMG = shutil.which(
    "smg", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
)
needs_router = pytest.mark.skipif(
    SMG is None or importlib.util.find_spec("openai") is None,
    reason="needs the router and the openai package; install octavo[test,router]",
)


@asynccontextmanager
async def http_server(*flags: str) -> AsyncIterator[dict[str, str]]:
    """Yield serve_http.py's ready line with its ``pid``; check exit status 0 after SIGTERM."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), "--listen", "127.0.0.1:0", "--router-metrics", "127.0.0.1:0", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            if line.startswith(b"octavo http ready:"):
                break
        else:
            raise AssertionError(f"it ended with {await process.wait()} before it was ready")
        yield dict(word.split("=", 1) for word in line.decode().split()[3:]) | {"pid": str(process.pid)}
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(process.wait(), 60)
    assert code == 0


def openai_client(ready: dict[str, str]) -> Any:
    import openai

    return openai.AsyncOpenAI(
        base_url=f"http://{ready['http']}/v1", api_key="none", max_retries=0, timeout=60
    )


async def metrics_of(address: str) -> str:
    return await asyncio.to_thread(get, f"http://{address}/metrics")


def get(url: str, body: bytes | None = None) -> str:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return str(reply.read().decode())
