"""Answers that callers share and that are computed at most once per interval."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

AnswerT = TypeVar("AnswerT")


class SharedAnswer(Generic[AnswerT]):
    """Calls ``make`` for several threads, one call at a time and at least ``interval_s`` apart.

    An answer is never older than its query: its computation began after the caller arrived.
    """

    def __init__(
        self,
        make: Callable[[], AnswerT],
        interval_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._make = make
        self._interval_s = interval_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._made: tuple[float, AnswerT] | None = None  # the latest answer, and the start of its computation

    def __call__(self) -> AnswerT:
        came = self._clock()
        with self._lock:
            if self._made is not None:
                began, answer = self._made
                if began > came:
                    return answer
                if (rest := began + self._interval_s - self._clock()) > 0:
                    self._sleep(rest)
            began = self._clock()
            answer = self._make()
            self._made = began, answer
            return answer
