"""Runs the engine in a child process. Parent and child exchange pickled messages over a pipe."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ..api.config import EngineConfig
from ..api.engine_info import EngineInfo
from ..api.engine_request import EngineOutput, EngineRequest
from ..api.errors import EngineDead, EngineStopping
from ..api.stats import Gauges, Observer, StepRecord
from ..api.structured_output import StructuredOutput
from ..tokenizer.tokenizer import Tokenizer, load_tokenizer
from .commands import AnswerT, Command
from .engine_client import GrammarCompiler, Listener
from .engine_thread import EngineThread

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class _Call:
    """A method to call in the other process; its answer, if any, has the same number."""

    method: str
    arguments: tuple[Any, ...] = ()
    number: int | None = None


class _Pipe:
    """End of a pipe. Any thread may send; one thread receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        data = pickle.dumps(message)
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(data)

    def receive(self) -> Any:
        return pickle.loads(self._connection.recv_bytes())


class EngineProcess:
    info: EngineInfo
    tokenizer: Tokenizer
    capacity: int

    def __init__(self, config: EngineConfig, listener: Listener, observer: Observer | None = None) -> None:
        self._config = config
        self._listener = listener
        self._observer = observer
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._heard_at = time.monotonic()
        self._has_ended = False
        self.grammars: GrammarCompiler = self
        self._pipe: _Pipe | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = threading.Thread(target=self._read, name="octavo-engine-pipe", daemon=True)
        self.gauges = Gauges()

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._pipe = _Pipe(Connection(ours.detach()))
        self._pipe.send(self._config)
        self._reader.start()

    @property
    def step_seconds(self) -> float:
        return time.monotonic() - self._heard_at if self.gauges.num_running else 0.0

    def add(self, request: EngineRequest) -> None:
        self._call("add", request)

    def abort(self, number: int) -> None:
        self._call("abort", number)

    def run_command(self, command: Command[AnswerT]) -> Future[AnswerT]:
        return self._answered("run_command", command)

    def begin(self, structured: StructuredOutput, tenant: str = "") -> Future[int]:
        return self._answered("begin", structured, tenant)

    def drop(self, ticket: int | None) -> None:
        if ticket is not None:
            self._call("drop", ticket)

    def prepare(self) -> None:
        with contextlib.suppress(EngineStopping):
            self._answered("prepare").result()

    def close(self) -> None: ...

    def stop(self) -> None:
        self._call("stop")

    def join(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(JOIN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.error("the engine's process %d does not exit and is killed", self._process.pid)
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _call(self, method: str, *arguments: object) -> None:
        assert self._pipe is not None, "the engine was not started"
        self._pipe.send(_Call(method, arguments))

    def _answered(self, method: str, *arguments: object) -> Future[Any]:
        answer: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if not self._has_ended:
                self._answers[number] = answer
        if self._has_ended:
            answer.set_exception(EngineStopping("the engine ended before it could answer"))
            return answer

        def cancel(done: Future[Any]) -> None:
            if done.cancelled():
                self._call("cancel", number)

        answer.add_done_callback(cancel)
        assert self._pipe is not None, "the engine was not started"
        self._pipe.send(_Call(method, arguments, number))
        return answer

    def _read(self) -> None:
        error: BaseException | None
        assert self._pipe is not None
        try:
            while (call := self._pipe.receive()).method != "ended":
                self._handle(call.method, *call.arguments)
            (error,) = call.arguments
        except (EOFError, OSError):
            error = EngineDead("the engine's process ended unexpectedly; see its log messages")
        except Exception as caught:  # an error must not end this thread unnoticed
            logger.exception("the engine's process sent a message that cannot be read")
            error = caught
        with self._lock:
            self._has_ended, answers, self._answers = True, self._answers, {}
        self._listener.ended(error)
        for answer in answers.values():
            if answer.set_running_or_notify_cancel():
                answer.set_exception(EngineStopping("the engine ended before it could answer"))

    def _handle(self, method: str, *arguments: Any) -> None:
        match method:
            case "ready":
                self.info, self.capacity, self.gauges = arguments
                config = self._config
                self.tokenizer = load_tokenizer(
                    self.info.path,
                    config.chat_template,
                    reasoning_parser=config.reasoning_parser,
                    tool_call_parser=config.tool_call_parser,
                )
                self._listener.ready()
            case "step":
                (record,) = arguments
                self.gauges, self._heard_at = record.gauges, time.monotonic()
                if self._observer is not None:
                    self._observer.step(record)
            case "answer":
                number, value, error = arguments
                with self._lock:
                    answer = self._answers.pop(number, None)
                if answer is not None and answer.set_running_or_notify_cancel():
                    if error is not None:
                        answer.set_exception(error)
                    else:
                        answer.set_result(value)
            case _:
                getattr(self._listener, method)(*arguments)


class _Child:
    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe
        self._calls: dict[int, Future[Any]] = {}
        self.thread: EngineThread

    def ready(self) -> None:
        self._tell("ready", self.thread.info, self.thread.capacity, self.thread.gauges)

    def outputs(self, outputs: list[EngineOutput]) -> None:
        self._tell("outputs", outputs)

    def cache_changed(self) -> None:
        self._tell("cache_changed")

    def ended(self, error: BaseException | None) -> None:
        self._tell("ended", _portable(error))

    def step(self, record: StepRecord) -> None:
        self._tell("step", record)

    def rejected(self, reason: str) -> None: ...

    def _tell(self, method: str, *arguments: object) -> None:
        self._pipe.send(_Call(method, arguments))

    def serve(self) -> None:
        while True:
            try:
                call: _Call = self._pipe.receive()
            except (EOFError, OSError):
                return
            if call.method == "stop":
                return
            self._do(call)

    def _do(self, call: _Call) -> None:
        if call.method == "cancel":
            (number,) = call.arguments
            if (outcome := self._calls.get(number)) is not None:
                outcome.cancel()
        elif call.number is None:
            owner = self.thread.grammars if call.method == "drop" else self.thread
            getattr(owner, call.method)(*call.arguments)
        else:
            outcome = self._outcome(call)
            self._calls[call.number] = outcome
            outcome.add_done_callback(functools.partial(self._answer, call.number))

    def _outcome(self, call: _Call) -> Future[Any]:
        outcome: Future[Any] = Future()
        try:
            if call.method == "run_command":
                return self.thread.run_command(*call.arguments)
            if call.method == "begin":
                return self.thread.grammars.begin(*call.arguments)
            self.thread.grammars.prepare()
            outcome.set_result(None)
        except Exception as error:
            outcome.set_exception(error)
        return outcome

    def _answer(self, number: int, outcome: Future[Any]) -> None:
        self._calls.pop(number, None)
        if outcome.cancelled():
            return
        error = outcome.exception()
        value = None if error is not None else outcome.result()
        self._tell("answer", number, value, _portable(error))


def _portable(error: BaseException | None) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return EngineDead(f"{type(error).__name__}: {error}")
    return error


def main() -> None:
    """Run the child process; ``sys.argv[1]`` is the file descriptor of the pipe."""
    from .build import build_core  # loads MLX

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles the terminal's Ctrl-C
    os.set_inheritable(int(sys.argv[1]), False)
    pipe = _Pipe(Connection(int(sys.argv[1])))
    child = _Child(pipe)
    config: EngineConfig = pipe.receive()
    child.thread = EngineThread(functools.partial(build_core, config, child), child)
    child.thread.start()
    child.serve()
    child.thread.stop()
    child.thread.join()
