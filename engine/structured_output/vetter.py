"""Control of a helper process that vets schemas and grammars."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .library_tokenizer import TokenizerText
from .limits import CompileLimits
from .pipe_messages import MessageReader, packed

_MODULE = "octavo.engine.structured_output.vetting_process"
_READ = 2**16
_TIME_SIGNALS = {-signal.SIGXCPU}
_CRASH_SIGNALS = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGTRAP}


@dataclass(frozen=True, slots=True)
class Vetted:
    """A source that compiles within its limits."""

    grammar: str  # grammar in llguidance's form
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused source, with the reason for its sender. ``keeps``: whether the refusal is permanent."""

    reason: str
    keeps: bool = True


class VettingUnavailable(Exception):
    """The helper process could not be started, or was ended from outside."""


class _Ended(Exception):
    """The helper process has closed its pipes."""


class _TooLate(Exception):
    """The helper process did not answer in time."""


class Vetter:
    """One helper process, started at its first use and restarted after each end.

    For one thread at a time, except ``interrupt`` and ``close``.
    """

    def __init__(self, tokenizer: TokenizerText, limits: CompileLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = MessageReader()
        self._is_closed = False
        self.num_started = 0

    def vet(self, kind: str, source: str, *, is_wanted: Callable[[], bool]) -> Vetted | Refused:
        """Vet a source in the helper process. Raises VettingUnavailable, also if ``is_wanted`` is false once
        the process has started."""
        self._start()
        if not is_wanted():
            raise VettingUnavailable("no request waits for it any more")
        try:
            answer = self._exchange({"kind": kind, "source": source}, self._limits.wall_s)
        except _TooLate:
            self._end()
            return Refused(f"compiling it takes more than {self._limits.wall_s:g} s", keeps=False)
        except _Ended:
            return self._refusal_of_death(self._end())
        if "refused" in answer:
            return Refused(answer["refused"])
        return Vetted(answer["grammar"], answer["cpu_s"])

    def interrupt(self) -> None:
        """End the process, from any thread; its current job raises VettingUnavailable."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process for good, from any thread; the thread that uses it must ``reap`` it."""
        self._is_closed = True
        self.interrupt()

    def reap(self) -> None:
        """Wait for the process's end after ``close``, on the thread that used it."""
        self._end()

    def _start(self) -> None:
        """Start a process, unless it runs already."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        if self._is_closed:
            raise VettingUnavailable("the engine was stopped")
        self._reader = MessageReader()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # only the engine's process handles a terminal's Ctrl-C
            )
        except OSError as error:
            raise VettingUnavailable(f"the helper process cannot be started: {error}") from error
        self.num_started += 1
        if self._is_closed:  # closed meanwhile
            self.interrupt()
        try:
            answer = self._exchange(self._setup(), self._limits.start_s)
        except (_Ended, _TooLate) as error:
            raise VettingUnavailable(
                f"the helper process did not start (exit status {self._end()})"
            ) from error
        if (reason := answer.get("refused")) is not None:
            self._end()
            raise VettingUnavailable(f"the helper process cannot read the tokenizer: {reason}")

    def _setup(self) -> dict[str, Any]:
        text = self._tokenizer
        return {
            "tokenizer": text.serialized,
            "num_tokens": text.num_tokens,
            "end_ids": text.end_ids,
            "limits": asdict(self._limits),
        }

    def _refusal_of_death(self, code: int) -> Refused:
        """Return the refusal for an exit status during compilation."""
        limits = self._limits
        if code in _TIME_SIGNALS:
            return Refused(f"compiling it takes more than {limits.compile_s:g} s")
        if code in _CRASH_SIGNALS:
            return Refused(
                "its rules are too deep or too many: compiling it takes more than "
                f"{limits.stack_bytes >> 20} MiB of stack or {limits.memory_bytes >> 20} MiB of memory"
            )
        raise VettingUnavailable(f"the helper process was ended while it compiled (exit status {code})")

    def _exchange(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a message and return the answer. Raises _Ended or _TooLate."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        data = memoryview(packed(message))
        os.set_blocking(process.stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(process.stdin, selectors.EVENT_WRITE)
            while (answer := self._reader.next()) is None:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise _TooLate
                for key, _ in ready:
                    if key.fileobj is process.stdout:
                        if not (got := os.read(key.fd, _READ)):
                            raise _Ended
                        self._reader.feed(got)
                        continue
                    try:
                        data = data[os.write(key.fd, data) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError as error:
                        raise _Ended from error
                    if not data:
                        selector.unregister(process.stdin)
        return answer

    def _end(self) -> int:
        """End the process if it still runs; return its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=1.0)  # a crashed process has an exit status
        process.kill()
        return process.wait()
