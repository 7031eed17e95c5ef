"""The router as a supervised child: started again when it ends by itself, always ended with us."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import ssl
import sys
import urllib.request
from collections.abc import Sequence
from typing import Any

from ..api.address import Address
from ..api.errors import EngineDead
from .options import HttpOptions, reachable, router_arguments

logger = logging.getLogger(__name__)

MAX_FAILURES = 5  # ends in a row, without having served in between
PAUSE_S = 0.5  # before the second try in a row and later ones; there is none before the first
POLL_S = 0.1
KILL_AFTER_S = 2.0  # beyond the time that running requests may take
_LAUNCHER = "octavo.engine.http.launcher"


class Router:
    """Serves HTTP before one worker from ``start`` to ``stop``.

    ready    whether it serves now
    pid      of its process; it changes when the router had to be started again
    gone     set when it ended so often that it is not tried again
    num_restarts   how often it was started again
    """

    def __init__(
        self,
        options: HttpOptions,
        worker: Address,
        *,
        model: str,
        aliases: Sequence[str] = (),
        grace_s: float,
        launcher: Sequence[str] = (sys.executable, "-m", _LAUNCHER),
    ) -> None:
        """As ``router_arguments``. ``launcher``: the command that becomes the router."""
        self.options = options
        self.ready = False
        self.pid: int | None = None
        self.gone = asyncio.Event()
        self.num_restarts = 0
        self._model = model
        self._grace_s = grace_s
        self._launcher = launcher
        self._control_key = secrets.token_hex(16)
        self._arguments = router_arguments(
            options, worker, model=model, aliases=aliases, control_key=self._control_key, grace_s=grace_s
        )
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._served = asyncio.Event()  # at least once
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when clients can be served. EngineDead if the router ends again and again."""
        self._supervisor = asyncio.create_task(self._supervise())
        waits = [asyncio.create_task(event.wait()) for event in (self._served, self.gone)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.gone.is_set():
            raise EngineDead(
                f"the HTTP router ended {MAX_FAILURES} times before it served; its words are above"
            )

    async def stop(self) -> None:
        """Let running requests finish for ``grace_s`` seconds, then end it. May be called again."""
        self._stopping = True
        self.ready = False
        if self._process is not None:
            await _end(self._process, self._grace_s + KILL_AFTER_S)
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor

    async def _supervise(self) -> None:
        failures = 0
        while True:
            process = await self._spawn()
            if await self._until_ready(process):
                failures = 0
                self.ready = True
                if self.num_restarts:
                    logger.warning("the HTTP router serves again, as process %d", process.pid)
                self._served.set()
            code = await process.wait()
            self.ready = False
            _close_input(process)
            if self._stopping:
                return
            failures += 1
            if failures >= MAX_FAILURES:
                logger.critical("the HTTP router ended %d times in a row; not started again", failures)
                self.gone.set()
                return
            logger.error("the HTTP router ended with %d; starting it again", code)
            self.num_restarts += 1
            await asyncio.sleep(PAUSE_S if failures > 1 else 0)

    async def _spawn(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self._launcher,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,  # a picture, and nothing else
            start_new_session=True,  # Ctrl-C comes to us, and we end it
        )
        self._process, self.pid = process, process.pid
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._arguments).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it has ended already: wait() says so
            await process.stdin.drain()
        return process

    async def _until_ready(self, process: asyncio.subprocess.Process) -> bool:
        """Wait until the router serves the model, with its tokenizer; False if it ends before."""
        base = f"{self.options.scheme}://{reachable(self.options.listen)}"
        while process.returncode is None:
            with contextlib.suppress(OSError, ValueError):
                models = await asyncio.to_thread(self._get_json, f"{base}/v1/models")
                tokenizers = await asyncio.to_thread(self._get_json, f"{base}/v1/tokenizers")
                if self._names_model(models, "data", "id") and self._names_model(
                    tokenizers, "tokenizers", "name"
                ):
                    return True
            await asyncio.sleep(POLL_S)
        return False

    def _names_model(self, reply: Any, key: str, name: str) -> bool:
        return any(entry.get(name) == self._model for entry in reply.get(key, ()))

    def _get_json(self, url: str) -> Any:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self._control_key}"})
        context = None
        if url.startswith("https:"):  # our own child, on this machine; its certificate names another host
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with urllib.request.urlopen(request, timeout=5, context=context) as reply:
            return json.load(reply)


def _close_input(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()


async def _end(process: asyncio.subprocess.Process, patience_s: float) -> None:
    """SIGTERM, so that running requests are finished; SIGKILL if that takes too long."""
    for end, patience in ((signal.SIGTERM, patience_s), (signal.SIGKILL, KILL_AFTER_S)):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(end)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), patience)
