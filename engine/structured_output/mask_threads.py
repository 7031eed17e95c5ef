"""Threads that compute masks during the forward pass.

A step waits for a mask for a limited time; then the request fails. Requests over their CPU budget get
their masks later, and steps continue without them.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from .library import first_line
from .mask_budget import MaskBudget

if TYPE_CHECKING:
    from llguidance import LLMatcher

NUM_THREADS = 2
MAX_STUCK = 4
MAX_MASK_S = 0.1  # CPU seconds of one mask
MAX_WAIT_S = 2.0  # seconds to wait for one mask
SLOW_MASK_S = 0.005  # CPU seconds; after a slower mask, no masks for draft tokens are computed
MAX_WAITS_S = 0.25
SPENT_SHARE = 0.1  # largest share of one CPU for requests over their budget
WAITS_SHARE = 0.25
_LOOK_S = 0.005

_HAS_THREAD_CLOCKS = hasattr(time, "pthread_getcpuclockid")  # not on macOS


class MaskFailed(Exception):
    """The mask could not be computed."""


class MaskLate(Exception):
    """The mask is not ready in time."""


@dataclass(slots=True, eq=False)
class SharedLexer:
    num_stuck: int = 0


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(slots=True, eq=False)
class MaskJob:
    """Computation of a matcher's mask, and of the masks after drafts. ``done`` is locked until its end."""

    matcher: LLMatcher
    budget: MaskBudget
    lexer: SharedLexer
    drafts: Sequence[int] = ()
    bits: bytes | None = None
    masks_after_drafts: list[bytes] = field(default_factory=list)
    error: str | None = None
    done: threading.Lock = field(default_factory=_locked)
    is_left: bool = False
    is_needed: bool = True
    is_late: bool = False
    is_deferred: bool = False
    submitted_at: float = field(default_factory=time.monotonic)
    _clock: int | None = None
    _began: float | None = None

    def run(self) -> None:
        self._clock = _thread_clock()
        self._began = began = _now(self._clock)
        try:
            if self.is_needed and self.bits is None:
                self.bits = self.matcher.compute_bitmask()
                if self.matcher.is_error():
                    self.error = first_line(self.matcher.get_error())
        except BaseException as error:
            self.error = first_line(str(error)) or type(error).__name__
        taken = _now(self._clock) - began
        self.budget.charge(taken)
        if self.drafts and self.error is None and taken < SLOW_MASK_S:
            self._compute_after_drafts(self._clock)
        self.done.release()

    def _compute_after_drafts(self, clock: int | None) -> None:
        matcher = self.matcher.deep_copy()
        for draft in self.drafts:
            if not (self.is_needed and self.budget.has_drafts):
                break
            self._began = began = _now(clock)
            try:
                matcher.consume_token(draft)
                bits = matcher.compute_bitmask()
                held = not matcher.is_error()
            except BaseException:
                held = False
            taken = _now(clock) - began
            self.budget.charge_drafts(taken)
            if not held:
                break
            self.masks_after_drafts.append(bits)
            if taken >= SLOW_MASK_S:
                break

    @property
    def is_over(self) -> bool:
        if not self.done.locked():
            return False
        return self.is_late or self.is_deferred or self.budget.is_over(self.taken_s())

    def taken_s(self) -> float:
        """CPU seconds of this mask so far."""
        began = self._began
        try:
            return 0.0 if began is None else _now(self._clock) - began
        except OSError:
            return 0.0


def _thread_clock() -> int | None:
    return time.pthread_getcpuclockid(threading.get_ident()) if _HAS_THREAD_CLOCKS else None


def _now(clock: int | None) -> float:
    return time.monotonic() if clock is None else time.clock_gettime(clock)


_Jobs: TypeAlias = "queue.PriorityQueue[tuple[float, int, MaskJob | None]]"


class MaskThreads:
    """Threads that compute masks. Call ``submit`` and ``wait`` on the engine's thread."""

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.PriorityQueue()
        self._deferred: _Jobs = queue.PriorityQueue()
        self._closed = threading.Event()
        self._has_feeder = False
        self._number = itertools.count()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_stuck = 0
        self._waited_s = 0.0
        self._waited_at = 0.0

    @property
    def num_stuck(self) -> int:
        return self._num_stuck

    def submit(self, job: MaskJob, *, may_defer: bool = False) -> None:
        if self._num_threads < NUM_THREADS:
            self._fill_up()
        if may_defer and self._is_spent(job.budget):
            job.is_deferred = True
            self._put(self._deferred, job)
            self._start_feeder()
        else:
            self._put(self._jobs, job)

    def _is_spent(self, budget: MaskBudget) -> bool:
        return budget.is_spent or (budget.is_half_spent and self._waited_too_long())

    def _put(self, jobs: _Jobs, job: MaskJob | None) -> None:
        used_s = math.inf if job is None else job.budget.used_s
        jobs.put((used_s, next(self._number), job))

    def has_failed(self, job: MaskJob) -> str | None:
        """Return why the mask cannot be computed, or None."""
        if not self._num_threads:
            why = "the engine was stopped" if self._closed.is_set() else "too many other masks are stuck"
            return f"its mask cannot be computed: {why}"
        waited_s = 0.0 if job.is_deferred else time.monotonic() - job.submitted_at
        if job.lexer.num_stuck or job.taken_s() > MAX_MASK_S or waited_s > MAX_WAIT_S:
            return f"it is too ambiguous or too large: computing a mask took more than {MAX_MASK_S:g} s"
        return None

    def wait(self, job: MaskJob, *, may_be_late: bool = False) -> bytes:
        """Wait for a mask. Raises MaskFailed or MaskLate."""
        if not job.done.acquire(blocking=False):
            self._wait(job, may_be_late=may_be_late)
        job.done.release()
        if job.error is not None:
            raise MaskFailed(job.error)
        assert job.bits is not None, "a finished job has no failure"
        return job.bits

    def close(self) -> None:
        """End the threads without waiting. Later jobs fail."""
        with self._lock:
            for _ in range(self._num_threads):
                self._put(self._jobs, None)
            self._closed.set()
            self._put(self._deferred, None)

    def _wait(self, job: MaskJob, *, may_be_late: bool) -> None:
        began = time.monotonic()
        if job.is_deferred and not may_be_late:
            self._begin(job)
        try:
            while not job.done.acquire(timeout=_LOOK_S):
                if (why := self.has_failed(job)) is not None:
                    self._leave(job)
                    raise MaskFailed(why)
                if may_be_late and job.is_over:
                    job.is_late = True
                    raise MaskLate
        finally:
            self._note_wait(time.monotonic() - began)

    def _note_wait(self, seconds: float) -> None:
        now = time.monotonic()
        left = self._waited_s - WAITS_SHARE * (now - self._waited_at)
        self._waited_s, self._waited_at = max(0.0, left) + seconds, now

    def _waited_too_long(self) -> bool:
        return self._waited_s - WAITS_SHARE * (time.monotonic() - self._waited_at) > MAX_WAITS_S

    def _leave(self, job: MaskJob) -> None:
        with self._lock:
            job.is_needed = False
            if job.taken_s() and job.done.locked():
                job.is_left = True
                job.lexer.num_stuck += 1
                self._num_stuck += 1
                self._num_threads -= 1
        self._fill_up()

    def _fill_up(self) -> None:
        with self._lock:
            most = 0 if self._closed.is_set() else NUM_THREADS
            while self._num_threads < most and self._num_stuck < MAX_STUCK:
                self._num_threads += 1
                threading.Thread(target=self._work, name="octavo-masks", daemon=True).start()

    def _start_feeder(self) -> None:
        with self._lock:
            if not (self._has_feeder or self._closed.is_set()):
                self._has_feeder = True
                threading.Thread(target=self._feed, name="octavo-masks-put-off", daemon=True).start()

    def _feed(self) -> None:
        while (job := self._deferred.get()[-1]) is not None and not self._closed.is_set():
            spent_s = job.budget.spent_s
            if not (job.is_needed and self._begin(job)):
                continue
            while not (job.is_left or job.done.acquire(timeout=_LOOK_S)):
                pass
            if not job.is_left:
                job.done.release()
            taken_s = job.taken_s() if job.is_left else job.budget.spent_s - spent_s
            del job
            self._closed.wait(taken_s * (1 / SPENT_SHARE - 1))

    def _begin(self, job: MaskJob) -> bool:
        with self._lock:
            if not job.is_deferred:
                return False
            job.submitted_at, job.is_late, job.is_deferred = time.monotonic(), True, False
        self._put(self._jobs, job)
        return True

    def _work(self) -> None:
        while (job := self._jobs.get()[-1]) is not None:
            job.run()
            with self._lock:
                if job.is_left:
                    job.lexer.num_stuck -= 1
                    self._num_stuck -= 1
                    if self._num_threads >= NUM_THREADS or self._closed.is_set():
                        return
                    self._num_threads += 1
            del job
        with self._lock:
            self._num_threads -= 1
