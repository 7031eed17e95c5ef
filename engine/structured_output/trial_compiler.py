from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .helper_process import HelperEnded, HelperLate, HelperProcess, next_message, packed
from .library_tokenizer import TokenizerText
from .limits import CompileLimits

_TIME_SIGNALS = {-signal.SIGXCPU}
_CRASH_SIGNALS = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGTRAP}


@dataclass(frozen=True, slots=True)
class Accepted:
    """A source that compiles within its limits."""

    grammar: str
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused source and the reason."""

    reason: str
    keeps: bool = True


class HelperUnavailable(Exception):
    """The helper process did not start, or ended unexpectedly."""


class TrialCompiler(HelperProcess):
    """Owns one helper process, which starts at the first use."""

    _module = "octavo.engine.structured_output.trial_process"

    def __init__(self, tokenizer: TokenizerText, limits: CompileLimits) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._limits = limits
        self.num_started = 0

    def try_compile(self, kind: str, source: str, *, is_wanted: Callable[[], bool]) -> Accepted | Refused:
        """Test-compile a source in the helper process. Raises HelperUnavailable."""
        self._start()
        if not is_wanted():
            raise HelperUnavailable("no request waits for it any more")
        try:
            answer = self._ask({"kind": kind, "source": source}, self._limits.wall_s)
        except HelperLate:
            self._end()
            return Refused(f"compiling it takes more than {self._limits.wall_s:g} s", keeps=False)
        except HelperEnded:
            return self._refusal_of_death(self._end())
        if "refused" in answer:
            return Refused(answer["refused"])
        return Accepted(answer["grammar"], answer["cpu_s"])

    def close(self) -> None:
        """End the process permanently."""
        self._is_closed = True
        self.interrupt()

    def reap(self) -> None:
        """Wait for the end of the process after ``close``."""
        self._end()

    def _start(self) -> None:
        if self._is_running:
            return
        self._end()
        if self._is_closed:
            raise HelperUnavailable("the engine was stopped")
        try:
            self._spawn()
        except OSError as error:
            raise HelperUnavailable(f"the helper process cannot be started: {error}") from error
        self.num_started += 1
        if self._is_closed:
            self.interrupt()
        try:
            answer = self._ask(self._setup(), self._limits.start_s)
        except (HelperEnded, HelperLate) as error:
            raise HelperUnavailable(
                f"the helper process did not start (exit status {self._end()})"
            ) from error
        if (reason := answer.get("refused")) is not None:
            self._end()
            raise HelperUnavailable(f"the helper process cannot read the tokenizer: {reason}")

    def _setup(self) -> dict[str, Any]:
        text = self._tokenizer
        return {
            "tokenizer": text.serialized,
            "num_tokens": text.num_tokens,
            "end_ids": text.end_ids,
            "limits": asdict(self._limits),
        }

    def _refusal_of_death(self, code: int) -> Refused:
        limits = self._limits
        if code in _TIME_SIGNALS:
            return Refused(f"compiling it takes more than {limits.compile_s:g} s")
        if code in _CRASH_SIGNALS:
            return Refused(
                "its rules are too deep or too many: compiling it takes more than "
                f"{limits.stack_bytes >> 20} MiB of stack or {limits.memory_bytes >> 20} MiB of memory"
            )
        raise HelperUnavailable(f"the helper process was ended while it compiled (exit status {code})")

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        return self._exchange(packed(message), seconds, next_message)
