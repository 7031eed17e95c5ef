from __future__ import annotations

import atexit
import functools
import logging
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..api.engine_info import EngineInfo
from ..api.engine_request import EngineOutput, EngineRequest
from ..api.errors import EngineStopping, OctavoError
from ..api.outputs import Delta, FinishReason
from ..api.stats import Gauges
from ..tokenizer.tokenizer import Tokenizer
from .commands import AnswerT, Command, CommandTarget
from .engine_client import GrammarCompiler, Listener
from .engine_core import EngineCore
from .request import Request, Update

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 10.0
COMMANDS_PER_STEP = 16


class _PendingCommand:
    def __init__(self, command: Command[Any]) -> None:
        self.command = command
        self.answer: Future[Any] = Future()

    def refuse(self) -> None:
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(EngineStopping("the engine ended before it could answer"))


class EngineThread:
    """An ``EngineClient`` that runs the core on one thread."""

    info: EngineInfo
    tokenizer: Tokenizer
    capacity: int
    grammars: GrammarCompiler

    def __init__(self, make_core: Callable[[], EngineCore], listener: Listener) -> None:
        self._make_core = make_core
        self._core: EngineCore | None = None
        self._listener = listener
        self._inbox: queue.SimpleQueue[Callable[[EngineCore], None] | None] = queue.SimpleQueue()
        self._commands: deque[_PendingCommand] = deque()
        self._has_ended = threading.Event()
        self._open: dict[int, Request] = {}
        # A daemon thread, so that a program can end without stopping its engine.
        self._thread = threading.Thread(target=self._main, name="octavo-engine", daemon=True)

    @property
    def gauges(self) -> Gauges:
        return self._core.gauges if self._core is not None else Gauges()

    @property
    def step_seconds(self) -> float:
        return 0.0 if self._core is None else self._core.step_seconds

    def start(self) -> None:
        self._thread.start()
        atexit.register(self._stop_at_exit)

    def add(self, request: EngineRequest) -> None:
        self._inbox.put(functools.partial(self._add, request))

    def abort(self, number: int) -> None:
        self._inbox.put(functools.partial(self._abort, number))

    def run_command(self, command: Command[AnswerT]) -> Future[AnswerT]:
        pending = _PendingCommand(command)
        self._commands.append(pending)
        if self._has_ended.is_set():
            self._refuse_commands()
        else:
            self.wake()
        return pending.answer

    def wake(self) -> None:
        self._inbox.put(lambda _: None)

    def stop(self) -> None:
        self._inbox.put(None)

    def join(self) -> None:
        self._thread.join()
        atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        self.stop()
        self._thread.join(timeout=EXIT_TIMEOUT_S)

    def _main(self) -> None:
        error: BaseException | None = None
        core: EngineCore | None = None
        try:
            core = self._make_core()
            core.on_update(self.wake)
            self._core, self.info, self.tokenizer = core, core.info, core.tokenizer
            self.capacity, self.grammars = core.capacity, core.builder.grammars
            self._listener.ready()
            self._loop(core)
        except BaseException as caught:  # nothing may end this thread silently
            error = caught
        # Report the end first, because closing may wait for a disk.
        self._has_ended.set()
        self._listener.ended(error)
        self._refuse_commands()
        try:
            if core is not None:
                core.close()
        except Exception:
            logger.exception("the engine could not be closed")
        _leave_mlx()

    def _loop(self, core: EngineCore) -> None:
        parts = CommandTarget(core.cache, core.transfer, core.parts, core.shards)
        while self._read_inbox(core):
            self._execute_commands(core, parts)
            if core.has_work:
                self._emit(core.step())
            if core.cache.has_updates():
                self._listener.cache_changed()
        self._emit(core.finish())

    def _emit(self, updates: list[Update]) -> None:
        for request, delta in updates:
            if delta.finish_reason is not None and request.finish_reason is not None:
                self._open.pop(request.number, None)
        if updates:
            self._listener.outputs([EngineOutput(request.number, delta) for request, delta in updates])

    def _read_inbox(self, core: EngineCore) -> bool:
        while True:
            try:
                note = self._inbox.get(block=not (core.has_work or self._commands))
            except queue.Empty:
                return True
            if note is None:
                return False
            note(core)

    def _execute_commands(self, core: EngineCore, parts: CommandTarget) -> None:
        if self._commands:
            core.settle()
        for _ in range(min(len(self._commands), COMMANDS_PER_STEP)):
            _answer(self._commands.popleft(), core, parts)

    def _refuse_commands(self) -> None:
        while self._commands:
            try:
                pending = self._commands.popleft()
            except IndexError:
                return
            pending.refuse()

    def _add(self, request: EngineRequest, core: EngineCore) -> None:
        try:
            built = core.builder.build(request)
            core.add(built)
        except (ValueError, OctavoError) as error:
            logger.exception("request %s was refused after it had been accepted", request.request_id)
            self._listener.outputs(
                [EngineOutput(request.number, delta) for delta in _refusals(request, str(error))]
            )
        else:
            self._open[request.number] = built

    def _abort(self, number: int, core: EngineCore) -> None:
        if (request := self._open.get(number)) is not None:
            core.abort(request)


def _answer(pending: _PendingCommand, core: EngineCore, parts: CommandTarget) -> None:
    if not pending.answer.set_running_or_notify_cancel():
        return
    try:
        answer = pending.command.execute(parts)
        core.measure()
    except Exception as error:  # handled by the caller; the engine continues
        pending.answer.set_exception(error)
    else:
        pending.answer.set_result(answer)


def _leave_mlx() -> None:
    """Release this thread's MLX streams; otherwise the process aborts at exit."""
    mlx = sys.modules.get("mlx.core")
    if mlx is not None:
        try:
            mlx.synchronize()
            mlx.clear_streams()
        except Exception:
            logger.exception("MLX's streams could not be closed")


def _refusals(request: EngineRequest, message: str) -> list[Delta]:
    return [
        Delta(request_id=request.request_id, index=index, finish_reason=FinishReason.ERROR, error=message)
        for index in range(request.params.n)
    ]
