"""The engine's thread: loads the model, runs the loop, and tells the event loop what is new."""

from __future__ import annotations

import atexit
import logging
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from ..api.errors import EngineStopping
from ..api.outputs import Delta, FinishReason
from .commands import AnswerT, Command, CommandTarget
from .engine_core import EngineCore
from .request import Request, Update

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 10.0
COMMANDS_PER_STEP = 16  # executed between two steps, at most: whoever asks much holds up nobody


class Listener(Protocol):
    """Hears from the engine's thread, on that thread: must be quick and must not raise."""

    def ready(self, core: EngineCore) -> None: ...

    def updates(self, updates: list[Update]) -> None: ...

    def cache_changed(self) -> None:
        """There are new page events, for those who watch."""
        ...

    def ended(self, error: BaseException | None) -> None:
        """The thread is about to end, after ``stop`` (None) or because of an error."""
        ...


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request


@dataclass(frozen=True, slots=True)
class _Abort:
    request: Request


@dataclass(frozen=True, slots=True)
class _Wake:
    """There may be something to do that is not in the inbox."""


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class _PendingCommand:
    """A command on its way, and whoever waits for its answer."""

    def __init__(self, command: Command[Any]) -> None:
        self.command = command
        self.answer: Future[Any] = Future()

    def refuse(self) -> None:
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(EngineStopping("the engine ended before it could answer"))


class EngineThread:
    """One thread that owns the core from its making to its end. Its methods only leave notes
    in its inbox and may be called from any thread."""

    def __init__(self, make_core: Callable[[], EngineCore], listener: Listener) -> None:
        self._make_core = make_core
        self._listener = listener
        self._inbox: queue.SimpleQueue[_Add | _Abort | _Wake | _Stop] = queue.SimpleQueue()
        self._commands: deque[_PendingCommand] = deque()
        self._has_ended = threading.Event()
        # A daemon, so that a program that forgets to stop its engine can still end.
        self._thread = threading.Thread(target=self._main, name="octavo-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()
        atexit.register(self._stop_at_exit)

    def add(self, request: Request) -> None:
        self._inbox.put(_Add(request))

    def abort(self, request: Request) -> None:
        """Before the engine's next step, the request's pages are idle."""
        self._inbox.put(_Abort(request))

    def ask(self, command: Command[AnswerT]) -> Future[AnswerT]:
        """The answer of a command, which is executed between two steps. What that raises becomes the
        future's; EngineStopping when the thread ends first."""
        pending = _PendingCommand(command)
        self._commands.append(pending)
        if self._has_ended.is_set():
            self._refuse_commands()
        else:
            self.wake()
        return pending.answer

    def wake(self) -> None:
        """The core may have work that did not come through the inbox."""
        self._inbox.put(_Wake())

    def stop(self) -> None:
        """End after the current step, and abort whatever is still running."""
        self._inbox.put(_Stop())

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()
        atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        """The interpreter must not be taken down under a running step."""
        self.stop()
        self._thread.join(timeout=EXIT_TIMEOUT_S)

    def _main(self) -> None:
        error: BaseException | None = None
        core: EngineCore | None = None
        try:
            core = self._make_core()
            core.on_news(self.wake)
            self._listener.ready(core)
            self._loop(core)
        except BaseException as caught:  # nothing may end this thread unseen
            error = caught
        # Told first: closing may wait for a disk, and nobody should wait for the engine meanwhile.
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
        parts = CommandTarget(core.cache, core.transfer)
        while self._read_inbox(core):
            self._execute_commands(core, parts)
            if core.has_work:
                self._listener.updates(core.step())
            if core.cache.has_news():
                self._listener.cache_changed()
        self._listener.updates(core.finish())

    def _read_inbox(self, core: EngineCore) -> bool:
        """Do what the notes say, waiting for one if there is nothing else to do; False to end."""
        while True:
            try:
                note = self._inbox.get(block=not (core.has_work or self._commands))
            except queue.Empty:
                return True
            match note:
                case _Add(request):
                    self._add(core, request)
                case _Abort(request):
                    core.abort(request)
                case _Stop():
                    return False

    def _execute_commands(self, core: EngineCore, parts: CommandTarget) -> None:
        """The oldest ones; the others after the next step."""
        if self._commands:
            core.settle()
        for _ in range(min(len(self._commands), COMMANDS_PER_STEP)):
            _answer(self._commands.popleft(), core, parts)

    def _refuse_commands(self) -> None:
        """Nobody will answer what is left."""
        while self._commands:
            try:
                pending = self._commands.popleft()
            except IndexError:  # another thread was faster
                return
            pending.refuse()

    def _add(self, core: EngineCore, request: Request) -> None:
        try:
            core.add(request)
        except ValueError as error:  # admission checks the same rules, so this is not expected
            logger.exception("request %s was admitted and then refused", request.request_id)
            self._listener.updates([Update(request, delta) for delta in _refusals(request, str(error))])


def _answer(pending: _PendingCommand, core: EngineCore, parts: CommandTarget) -> None:
    if not pending.answer.set_running_or_notify_cancel():
        return
    try:
        answer = pending.command.execute(parts)
        if pending.command.changes_pages:
            core.measure()
    except Exception as error:  # the asker's to handle; the engine goes on
        pending.answer.set_exception(error)
    else:
        pending.answer.set_result(answer)


def _leave_mlx() -> None:
    """MLX's streams are thread-local, and the process is aborted at its exit ("terminate called
    without an active exception") if a thread that had some ended without giving them back."""
    mlx = sys.modules.get("mlx.core")
    if mlx is not None:
        try:
            mlx.synchronize()
            mlx.clear_streams()
        except Exception:
            logger.exception("MLX's streams could not be closed")


def _refusals(request: Request, message: str) -> list[Delta]:
    return [
        Delta(request_id=request.request_id, index=index, finish_reason=FinishReason.ERROR, error=message)
        for index in range(request.params.n)
    ]
