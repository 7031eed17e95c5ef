"""Servers to attack: ``octavo serve`` processes with tenants and small pools."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from behind_nginx import proxy
from octavo.engine.client.client import Client
from octavo.engine.client.credentials import ClientCredentials
from octavo.engine.client.server_process import ServerProcess

from .attack import Target

DRAIN_S = 5.0
EXIT_S = DRAIN_S + 5.0
TENANTS = ("alice", "bob", "mallory", "operator")
ATTACKER = "mallory"
BASE = ("--drain-timeout", str(DRAIN_S), "--http", "127.0.0.1:0")
_HYBRID = ("--model", "demo-hybrid", "--state-memory", "2MiB", "--num-pages", "96", "--page-size", "16")
SETUPS: dict[str, tuple[str, ...]] = {
    "usual": ("--num-pages", "1024", "--max-pinned-pages", "64"),
    "tiny": ("--num-pages", "80", "--page-size", "16"),
    "disk": ("--num-pages", "256", "--page-size", "16"),
    "recurrent": (*_HYBRID, "--swap-memory", "64MiB"),
    "recurrent-disk": _HYBRID,
    "nginx": ("--num-pages", "1024"),
}
BEHIND_NGINX = "nginx"
WITH_FOLDER = {"recurrent-disk"}
WITH_OWN_MODEL = {"recurrent", "recurrent-disk"}
IN_SMALL_DISK = 'mount -t tmpfs -o size={size} octavo-chaos "{folder}" && exec "$@"'


@dataclass(frozen=True, slots=True)
class Folder:
    path: Path
    model: str = "demo"

    @classmethod
    def make(cls, path: Path, model: str = "demo") -> Folder:
        lines = [f"{tenant} {tenant}-token-0123456789" for tenant in TENANTS]
        (path / "tokens").write_text("\n".join(lines) + "\n")
        for tenant in TENANTS:
            (path / f"{tenant}.token").write_text(f"{tenant}-token-0123456789\n")
        (path / "saved").mkdir()
        (path / "cache").mkdir()
        return cls(path, model)

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    def client(self, address: str, tenant: str) -> Client:
        return Client(address, ClientCredentials(token_file=self.path / f"{tenant}.token"))


def small_disk(folder: Path, *, size: str) -> tuple[str, ...] | None:
    """Return a command prefix that mounts a file system of ``size`` at ``folder``; None without
    permission."""
    script = IN_SMALL_DISK.format(size=size, folder=folder)
    launcher = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    with contextlib.suppress(OSError):
        if subprocess.run([*launcher, "true"], capture_output=True, check=False).returncode == 0:
            return launcher
    return None


class Server:
    def __init__(
        self, setup: str, folder: Folder, *, launcher: tuple[str, ...] = (), disk: bool = False
    ) -> None:
        flags = [*BASE, *SETUPS[setup], "--auth-token-file", str(folder.path / "tokens")]
        if setup not in WITH_OWN_MODEL:
            flags += ["--model", folder.model]
        flags += ["--save-dir", str(folder.path / "saved")]
        if disk or setup in WITH_FOLDER:
            flags += ["--cache-dir", str(folder.cache if disk else folder.path / "states")]
        self.folder = folder
        self.setup = setup
        self.proxy: str | None = None
        self.process = ServerProcess(flags, stop_timeout=EXIT_S + 20, launcher=launcher)

    @property
    def address(self) -> str:
        return self.proxy or self.process.ready["grpc"]

    @property
    def metrics(self) -> str:
        return self.process.ready["metrics"]

    @property
    def runs(self) -> bool:
        return self.process.returncode is None and Path(f"/proc/{self.process.pid}").exists()

    def seen_by_server(self, path: Path) -> Path:
        return Path(f"/proc/{self.process.pid}/root{path}")

    def target(self, seconds: float) -> Target:
        return Target(
            address=self.address,
            http=self.process.ready["http"],
            metrics=self.metrics,
            token=f"{ATTACKER}-token-0123456789",
            operator_token="operator-token-0123456789",
            seconds=seconds,
        )

    async def end(self) -> list[str]:
        if not self.runs:
            return [self.dead_error()]
        began = time.monotonic()
        code = await self.process.stop()
        seconds = time.monotonic() - began
        wrong = [] if code == 0 else [f"it ended with {code} after SIGTERM"]
        if seconds > EXIT_S:
            wrong.append(f"it took {seconds:.1f} s to end after SIGTERM, {EXIT_S:.0f} are allowed")
        return wrong

    async def kill(self) -> None:
        self.process.signal(signal.SIGKILL)
        await self.process.wait()

    def dead_error(self) -> str:
        words = [line for line in self.process.last_errors if line.strip()]
        return f"the server ended with {self.process.returncode}: {words[-1] if words else 'no message'}"


@contextlib.asynccontextmanager
async def started(server: Server) -> AsyncIterator[Server]:
    await server.process.start()
    try:
        async with contextlib.AsyncExitStack() as stack:
            if server.setup == BEHIND_NGINX:
                made = proxy(server.folder.path, server.process.ready["grpc"])
                server.proxy = await stack.enter_async_context(made)
            yield server
    finally:
        if server.runs:
            await server.kill()
