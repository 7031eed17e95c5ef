from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/bin:/usr/bin:/opt/homebrew/bin")
CONFIG = Path(__file__).parents[2] / "deploy" / "nginx" / "octavo.conf"


@contextlib.asynccontextmanager
async def proxy(
    folder: Path, target: str, changes: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = CONFIG.read_text()
    for old, new in (
        ("server 127.0.0.1:50051", f"server {target}"),
        ("listen 50050", f"listen 127.0.0.1:{port}"),
        ("/run/octavo-nginx.pid", str(folder / "pid")),
        *changes.items(),
    ):
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "octavo.conf"
    path.write_text(re.sub(r"worker_processes auto;", "worker_processes 1; daemon off;", text))
    assert NGINX is not None
    process = await asyncio.create_subprocess_exec(
        NGINX, "-p", str(folder), "-c", str(path), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            await asyncio.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()
