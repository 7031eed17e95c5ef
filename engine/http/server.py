from __future__ import annotations

import asyncio
import socket
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Sequence
from email.utils import formatdate
from typing import TYPE_CHECKING, cast

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from ..frontend.holders import Holders
from ..grpc.request_handler import RequestHandler
from ..grpc.security import ReloadableTls
from ..grpc.server import IMAGE_BYTES
from ..grpc.vllm.model_files import read_model_files
from .app import Check, Render, make_app
from .connection import IDLE_TIMEOUT_S, Connection
from .endpoint import Services
from .exchange import ByteBudget
from .logprobs import TokenTexts

if TYPE_CHECKING:
    from ..grpc.security import TlsFiles

BODIES = 32
ANSWER_BYTES = 64 * 2**20  # bytes of a complete response
MAX_CONNECTIONS = 8192
BACKLOG = 1024  # connections waiting to be accepted
HANDSHAKE_TIMEOUT_S = 10.0
TLS_READ_BYTES = 2**14  # read buffer of a TLS connection; asyncio's default is 256 KiB
SWEEP_S = 1.0
CLOSE_GRACE_S = 2.0  # seconds to send the last responses


class HttpServer:
    """Serves an engine over HTTP. It can be started once."""

    def __init__(
        self,
        handler: RequestHandler,
        *,
        calls: Holders,
        max_body_bytes: int,
        check: Check,
        render: Render,
        write_timeout_s: float = 30.0,
        max_connections: int = MAX_CONNECTIONS,
        allowed_origins: Sequence[str] = (),
    ) -> None:
        engine = handler.engine
        room = 0 if engine.info.images is None else IMAGE_BYTES
        self.services = Services(
            handler=handler,
            files=read_model_files(engine.info.path),
            bodies=ByteBudget(
                "request",
                max_body_bytes + room,
                BODIES * max_body_bytes + 4 * room,
                status=413,
                remedy="split the request, or start the server with a larger --max-message-size",
            ),
            answers=ByteBudget(
                "answer",
                ANSWER_BYTES,
                2 * ANSWER_BYTES,
                status=400,
                remedy="request fewer log probabilities, samples or prompts at once, or a stream",
            ),
            texts=TokenTexts(engine.tokenizer),
            calls=calls,
        )
        self._write_timeout_s = write_timeout_s
        self._max_connections = max_connections
        app: ASGIApp = make_app(self.services, check=check, render=render)
        if allowed_origins:
            app = CORSMiddleware(app, allow_origins=allowed_origins, allow_methods="*", allow_headers="*")
        self._config = Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=round(IDLE_TIMEOUT_S),
        )
        self._state = ServerState()
        self._tls: ReloadableTls | None = None
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        return len(self._state.connections)

    async def start(self, bound: socket.socket, tls: TlsFiles | None = None) -> None:
        """Accept connections on a bound socket."""
        self._config.load()
        if tls is not None:
            SSLProtocol.max_size = TLS_READ_BYTES
            self._tls = ReloadableTls(tls)
        self._sweep()
        self._server = await asyncio.get_running_loop().create_server(
            self._connection,
            sock=bound,
            ssl=None if self._tls is None else self._tls.context,
            ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_TIMEOUT_S,
            backlog=BACKLOG,
        )
        self._sweeper = asyncio.create_task(self._sweep_always())

    def reload(self) -> None:
        if self._tls is not None:
            self._tls.reload()

    async def stop(self) -> None:
        """Stop listening, send the last responses, and close all connections. Stop the engine first."""
        if self._server is None:
            return
        self._server.close()
        for connection in self._connections():
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=CLOSE_GRACE_S)
        assert self._sweeper is not None
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)
        for connection in self._connections():
            if connection.num_unsent:
                await asyncio.sleep(0.1)
                break
        for connection in self._connections():
            connection.transport.abort()
        for task in set(self._state.tasks):
            task.cancel()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=CLOSE_GRACE_S)

    def _connection(self) -> asyncio.Protocol:
        return Connection(config=self._config, server_state=self._state, app_state={})

    def _connections(self) -> list[Connection]:
        return cast(list[Connection], list(self._state.connections))

    async def _sweep_always(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._sweep()

    def _sweep(self) -> None:
        date = formatdate(time.time(), usegmt=True).encode()
        self._state.default_headers = [(b"date", date), (b"server", b"octavo")]
        now = time.monotonic()
        for connection in self._connections():
            connection.sweep(now, self._write_timeout_s)
        if (excess := len(self._state.connections) - self._max_connections) > 0:
            idle = [connection for connection in self._connections() if connection.is_idle]
            for connection in sorted(idle, key=lambda connection: connection.idle_since)[:excess]:
                connection.transport.abort()
