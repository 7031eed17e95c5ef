from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ..api.config import EngineConfig, checked
from ..api.engine_info import AdapterInfo, EngineInfo
from ..api.engine_request import EngineOutput, EngineRequest
from ..api.errors import EngineDead, EngineStopping, InvalidRequest, Overloaded
from ..api.outputs import Delta
from ..api.prompt import EncodedPrompt, Prompt
from ..api.sampling_params import SamplingParams
from ..api.stats import Gauges, Observer
from ..api.tenant import NO_TENANT, Tenant
from ..core import commands
from ..core.commands import AnswerT, Command
from ..core.engine_client import EngineClient
from ..core.engine_core import EngineCore
from ..core.engine_process import EngineProcess
from ..core.engine_thread import EngineThread
from ..tokenizer.tokenizer import Tokenizer
from .input_processor import InputProcessor, check_params, file_bytes
from .notifier import Notifier
from .output_streams import OutputStreams
from .request_limiter import refusal_label
from .text_executor import TextExecutor, call_on_daemon

CoreFactory: TypeAlias = Callable[[EngineConfig, Observer | None], EngineCore]

ABORT_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0


class AsyncEngine:
    """Serves concurrent requests; the engine runs on its own thread.

    Use it only on the event loop that called ``start``. After a fatal error, ``dead_error`` is that error,
    and all requests raise EngineDead.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        core_factory: CoreFactory | None = None,
        observer: Observer | None = None,
        own_process: bool = False,
    ) -> None:
        assert core_factory is None or not own_process, "a core must be made in the process that runs it"
        self._own_process = own_process
        self.config = checked(config)
        self.dead_error: BaseException | None = None
        self._core_factory = core_factory or _default_core
        self._observer = observer
        self._is_ready = False
        self._input: InputProcessor | None = None
        self._open = OutputStreams(config, abort=self._abort, gauges=self.gauges)
        self._texts = TextExecutor("encode")
        self._pictures = TextExecutor("decode pictures of")
        self._stopping = False
        self._client: EngineClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: asyncio.Future[None] | None = None
        self.cache_changes = Notifier()

    @property
    def info(self) -> EngineInfo:
        return self._running().info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._running().tokenizer

    def gauges(self) -> Gauges:
        """Gauges after the last step."""
        return self._running().gauges

    @property
    def num_streams(self) -> int:
        return self._open.num_read

    async def start(self) -> None:
        """Load the model and return when the engine is ready. Raises ModelLoadError or InvalidConfig."""
        if self._client is not None:
            raise RuntimeError("an engine can be started only once; create another engine")
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        bridge = LoopBridge(
            self._loop, self._on_ready, self._open.push, self.cache_changes.send, self._on_ended
        )
        if self._own_process:
            self._client = EngineProcess(self.config, bridge, self._observer)
        else:
            make_core = functools.partial(self._core_factory, self.config, self._observer)
            self._client = EngineThread(make_core, bridge)
        self._client.start()
        try:
            await asyncio.shield(self._started)
            assert self._input is not None
            await call_on_daemon(self._input.grammars.prepare, name="octavo-prepare")
        except asyncio.CancelledError:
            self._started.cancel()
            await self.stop()
            raise

    def step_seconds(self) -> float:
        """Return the duration of the current step so far, in seconds. Thread-safe."""
        return 0.0 if self._client is None else self._client.step_seconds

    async def stop(self, drain_timeout: float = 0.0) -> None:
        """Drain for ``drain_timeout`` seconds, then end the engine. May be called repeatedly."""
        self._stopping = True
        if self._client is None:
            return
        if drain_timeout > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._open.all_ended(), drain_timeout)
        for stream in self._open.streams():
            self._client.abort(stream.request.number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._open.all_ended(), ABORT_TIMEOUT_S)
        for stream in self._open.streams():
            stream.fail(EngineStopping("the engine was stopped"))
        self._client.stop()
        with contextlib.suppress(TimeoutError):  # the thread may hang
            await asyncio.wait_for(call_on_daemon(self._end, name="octavo-stop"), STOP_TIMEOUT_S)
        self._texts.close()
        self._pictures.close()

    def _end(self) -> None:
        if self._input is not None:
            self._input.grammars.close()
            self._input.close()
        assert self._client is not None
        self._client.join()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        salt: bytes = b"",
        priority: int = 0,
        final_only: bool = False,
        tenant: Tenant = NO_TENANT,
        adapter: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Stream the output of a request. Each delta has the index of its sample.

        The request starts with the iteration; closing the iterator aborts the request. If only this request
        fails, its last delta has the finish reason ERROR. Slow readers get merged deltas. Too much unread
        output raises SlowReader.

        salt        only requests with equal salt share cached pages
        priority    requests with smaller numbers are admitted first and preempted last
        final_only  deliver one delta per sample, at its end
        tenant      tenant of the request
        adapter     name of a loaded adapter; None for the base model

        Raises InvalidRequest, NotFound, RequestTooLong, Overloaded, QueueTimeout or EngineDead.
        """
        params, grammar = params or SamplingParams(), None
        with contextlib.ExitStack() as place:
            try:
                self._check_open(request_id)
                check_params(params)
                place.enter_context(self._open.limiter.sharing(tenant, params.n))
                assert self._input is not None
                with self._open.limiter.entering(self._input.min_tokens(prompt), params.n):
                    place.enter_context(self._open.limiter.holding(file_bytes(prompt)))
                    encoded = await self._input.encode_in_thread(prompt, self._texts, self._pictures)
                    grammar = await self._input.compile_in_thread(params, tenant.name)
                    request = self._input.admit(
                        encoded,
                        params,
                        request_id=request_id,
                        salt=salt,
                        priority=priority,
                        tenant=tenant.name,
                        grammar=grammar,
                        adapter=adapter,
                    )
                    self._open.limiter.check_sendable(request)
                engine = self._check_open(request_id)  # the engine may have ended during encoding
                self._open.limiter.check(request.num_prompt, params.n)
                self._open.limiter.check_memory(request)
                self._open.limiter.check_share(tenant, request.num_prompt)
                stream = self._open.add(request, self._give_up, final_only=final_only)
                engine.add(request)
            except BaseException as error:
                if self._input is not None:
                    self._input.grammars.drop(grammar)
                if self._observer is not None and isinstance(error, InvalidRequest | Overloaded | EngineDead):
                    self._observer.rejected(refusal_label(error))
                raise
            try:
                while (delta := await stream.next()) is not None:
                    yield delta
            finally:
                if not stream.ended:
                    self._abort(stream.request)
                    self._open.forget(stream)
                self._open.close(stream)

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """Loaded LoRA adapters by name."""
        return self._processor().adapters

    async def load_adapter(self, name: str, folder: Path, *, replace: bool = False) -> AdapterInfo:
        """Load a LoRA adapter saved by mlx-lm or PEFT. ``replace`` allows replacing a loaded adapter.

        Raises InvalidRequest if the adapter is unsupported or the replaced adapter is in use. Raises
        NotConfigured if the engine has no memory for adapters.
        """
        loaded = self._processor().adapters
        if name in (self.info.name, *self.info.aliases):
            raise InvalidRequest(
                f"an adapter's name must differ from the model's, got {name!r}; choose another name"
            )

        async def load() -> AdapterInfo:
            loaded[name] = await self.run_command(commands.load_adapter(name, str(folder), replace))
            return loaded[name]

        return await asyncio.shield(load())

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Raises NotFound for an unknown name, and InvalidRequest if it is in use."""
        loaded = self._processor().adapters

        async def unload() -> None:
            await self.run_command(commands.unload_adapter(name))
            loaded.pop(name, None)

        await asyncio.shield(unload())

    async def abort(self, request_id: str) -> None:
        """Abort a request; its last delta has the finish reason ABORT. Unknown ids are ignored."""
        stream = self._open.find(request_id)
        if stream is not None:
            self._abort(stream.request)

    def _abort(self, request: EngineRequest) -> None:
        assert self._client is not None
        self._client.abort(request.number)

    async def encode(self, prompt: Prompt) -> list[int]:
        return (await self.prepare(prompt)).ids

    async def prepare(self, prompt: Prompt) -> EncodedPrompt:
        """Encode and validate a prompt. Raises InvalidRequest, RequestTooLong or Overloaded."""
        limiter, processor = self._open.limiter, self._processor()
        with limiter.entering(processor.min_tokens(prompt)), limiter.holding(file_bytes(prompt)):
            return await processor.encode_in_thread(prompt, self._texts, self._pictures)

    def _give_up(self, request: EngineRequest) -> None:
        self._abort(request)
        if self._observer is not None:
            self._observer.rejected("queue_timeout")

    def _check_open(self, request_id: str | None) -> EngineClient:
        engine = self._running()
        if self._stopping:
            raise EngineStopping("the engine is shutting down; send the request to another engine")
        if request_id == "":
            raise InvalidRequest("request_id must not be empty; leave it out to get one")
        if request_id is not None and self._open.find(request_id) is not None:
            raise InvalidRequest(
                f"request id {request_id!r} is in use by an unfinished request; use another id"
            )
        return engine

    def _running(self) -> EngineClient:
        if self.dead_error is not None:
            raise self._dead() from self.dead_error
        if self._client is None or not self._is_ready:
            raise EngineStopping("the engine has not been started; await start() first")
        return self._client

    def _processor(self) -> InputProcessor:
        self._running()
        assert self._input is not None
        return self._input

    def _dead(self) -> EngineDead:
        return EngineDead(f"the engine has failed and must be restarted: {self.dead_error!r}")

    async def run_command(self, command: Command[AnswerT]) -> AnswerT:
        """Execute a command on the engine's thread, between two steps. Raises EngineDead or the command's
        errors."""
        self._running()
        assert self._client is not None
        try:
            return await asyncio.wrap_future(self._client.run_command(command))
        except EngineStopping:
            self._running()
            raise

    def _on_ready(self) -> None:
        assert self._client is not None
        engine, self._is_ready = self._client, True
        self._input = InputProcessor(engine, cut_max_tokens=self.config.cut_max_tokens)
        assert self._started is not None
        if not self._started.done():
            self._started.set_result(None)

    def _on_ended(self, error: BaseException | None) -> None:
        assert self._started is not None
        if error is None:
            if not self._started.done():
                self._started.set_exception(EngineStopping("the engine was stopped while it started"))
            return
        if not self._started.done():
            self._started.set_exception(error)
        self.dead_error = error
        for stream in self._open.streams():
            dead = self._dead()
            dead.__cause__ = error
            stream.fail(dead)


@dataclass(frozen=True)
class LoopBridge:
    """Calls functions on the event loop for the events of the engine's thread."""

    loop: asyncio.AbstractEventLoop
    on_ready: Callable[[], None]
    on_outputs: Callable[[list[EngineOutput]], None]
    on_cache_changed: Callable[[], None]
    on_ended: Callable[[BaseException | None], None]

    def ready(self) -> None:
        self._call(self.on_ready)

    def outputs(self, outputs: list[EngineOutput]) -> None:
        self._call(self.on_outputs, outputs)

    def cache_changed(self) -> None:
        self._call(self.on_cache_changed)

    def ended(self, error: BaseException | None) -> None:
        self._call(self.on_ended, error)

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback, *arguments)


def _default_core(config: EngineConfig, observer: Observer | None) -> EngineCore:
    from ..core.build import build_core

    return build_core(config, observer)
