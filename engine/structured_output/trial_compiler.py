from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .helper_process import HelperEnded, HelperLate, HelperProcess, HelperUnavailable
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


class TrialCompiler(HelperProcess):
    """Owns one helper process, which starts at the first use."""

    def __init__(self, tokenizer: dict[str, Any], limits: CompileLimits) -> None:
        setup = {"tokenizer": tokenizer, "limits": asdict(limits)}
        super().__init__("octavo.engine.structured_output.trial_process", setup, limits.start_s)
        self._limits = limits

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
