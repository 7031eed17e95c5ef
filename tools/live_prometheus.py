"""A real Prometheus that scrapes one server with the deployed configuration and rules."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
RULES = tuple(DEPLOY / "prometheus" / name for name in ("recording.yml", "alerts.yml"))
START_S = 120


@asynccontextmanager
async def live_prometheus(target: str, folder: Path) -> AsyncIterator[str]:
    """Run a Prometheus that scrapes ``target`` (host:port) once a second; yield its address.

    Raises FileNotFoundError if the program is missing (Debian's package ``prometheus``), and RuntimeError if
    it does not start.
    """
    config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    config = config.replace("127.0.0.1:9400", target).replace("15s", "1s")
    (folder / "prometheus.yml").write_text(config)
    for rules in RULES:
        shutil.copy(rules, folder)
    process = await asyncio.create_subprocess_exec(
        "prometheus", "--config.file", folder / "prometheus.yml", "--storage.tsdb.path", folder / "data",
        "--web.listen-address", "127.0.0.1:0", stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    reader = None
    try:
        async with asyncio.timeout(START_S):
            address = await ready_address(process.stderr)
        reader = asyncio.create_task(process.stderr.read())
        yield address
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        if reader is not None:
            await reader


async def ready_address(log: asyncio.StreamReader) -> str:
    address, ready = "", False
    while not (address and ready):
        line = await log.readline()
        if not line:
            raise RuntimeError("Prometheus ended before it was ready")
        ready = ready or b"Server is ready" in line
        if found := re.search(rb'"Listening on" address=(\S+)', line):
            address = found[1].decode()
    return address


async def query(address: str, path: str, **parameters: str) -> dict[str, Any]:
    """Request ``/api/v1/path`` of the HTTP API; return ``data`` of the answer. Raises HTTPError."""
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"

    def get() -> dict[str, Any]:
        with urllib.request.urlopen(url, timeout=10) as reply:
            data: dict[str, Any] = json.load(reply)["data"]
        return data

    return await asyncio.to_thread(get)


def in_prometheus(expression: str) -> str:
    return expression.replace("$instance", ".*").replace("$__rate_interval", "1m")
