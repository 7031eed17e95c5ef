from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..api.address import Address
from ..api.errors import EngineDead, InvalidConfig

POLICIES = ("cache_aware", "round_robin", "random", "power_of_two", "least_load", "prefix_hash")
READY_TIMEOUT_S = 120.0
LOCAL = Address("127.0.0.1", 0)
HEALTH_FLAGS = (
    "--health-check-interval-secs=2", "--health-check-timeout-secs=2", "--health-failure-threshold=2",
)  # fmt: skip


class RouterProcess:
    """An SMG router in front of workers, as in ``async with RouterProcess(addresses) as router``.

    Raises InvalidConfig if the package ``smg`` is missing. Port 0 becomes a free port.
    """

    def __init__(
        self,
        workers: Sequence[str],
        *,
        listen: Address = LOCAL,
        metrics: Address = LOCAL,
        policy: str = POLICIES[0],
    ) -> None:
        self._program = find_router()
        self._workers = list(workers)
        self.listen, self.metrics = _real_port(listen), _real_port(metrics)
        self._policy = policy
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    async def until_ready(self, models: Iterable[str]) -> None:
        """Wait until the router has every worker and model. Raises EngineDead after READY_TIMEOUT_S."""
        names = [repr(name) for name in models]
        for _ in range(round(READY_TIMEOUT_S / 0.1)):
            with contextlib.suppress(OSError, ValueError):
                found = [str(await self.get(path)) for path in ("/v1/models", "/v1/tokenizers")]
                workers = str(await self.get("/workers"))
                if all(name in text for name in names for text in found) and all(
                    address in workers for address in self._workers
                ):
                    return
            await asyncio.sleep(0.1)
        raise EngineDead(f"the router did not find its workers within {READY_TIMEOUT_S:g} s")

    async def get(self, path: str) -> Any:
        return await asyncio.to_thread(_get_json, f"http://{self.listen}{path}")

    async def wait(self) -> int:
        assert self._process is not None, "not started"
        return await self._process.wait()

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            self._program, "launch", "--host", self.listen.host, "--port", str(self.listen.port),
            "--prometheus-host", self.metrics.host, "--prometheus-port", str(self.metrics.port),
            "--policy", self._policy, *HEALTH_FLAGS, "--log-level", "warn",
            "--shutdown-grace-period-secs", "20",
            "--worker-urls", *(f"grpc://{address}" for address in self._workers),
            stdout=sys.__stderr__,
            start_new_session=True,
        )  # fmt: skip
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        for end, patience in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(end)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), patience)
                return


def find_router() -> str:
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join((beside, os.environ.get("PATH", "")))
    if (found := shutil.which("smg", path=path)) is None:
        raise InvalidConfig("the router is not installed; run in a checkout: pip install '.[router]'")
    return found


def _real_port(address: Address) -> Address:
    if address.port:
        return address
    with socket.create_server((address.host, 0)) as probe:
        return address.with_port(probe.getsockname()[1])


def _get_json(url: str) -> object:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=5) as reply:
        return json.load(reply)
