"""Threads that compute masks during the forward pass, while llguidance releases the interpreter lock.

A step waits for a mask for a bounded time. If a mask takes too long, its request fails, and its thread counts
as stuck until it is done. There are two threads, and one more for each stuck one, up to a limit.

Masks of requests over their budget are put off: they are computed one at a time with pauses, and steps
continue without the rows of these requests. All such requests together take ``SPENT_SHARE`` of one CPU.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from .library import first_line
from .mask_budget import MaskBudget

if TYPE_CHECKING:
    from llguidance import LLMatcher

NUM_THREADS = 2
MAX_STUCK = 4  # threads that may be stuck in masks that are no longer awaited
MAX_MASK_S = 0.1  # CPU seconds of one mask
MAX_WAIT_S = 2.0  # seconds to wait for one mask, however busy the machine is
SLOW_MASK_S = 0.005  # CPU seconds of a mask beyond which no masks are computed for drafts
MAX_WAITS_S = 0.25  # seconds that steps have waited; beyond it, a half-spent budget counts as spent
SPENT_SHARE = 0.1  # share of one CPU for the masks of all requests that have spent their budgets
WAITS_SHARE = 0.25  # the sum of these waits falls by this share of the elapsed time
_LOOK_S = 0.005  # seconds between checks of an awaited mask

_HAS_THREAD_CLOCKS = hasattr(time, "pthread_getcpuclockid")  # not on macOS


class MaskFailed(Exception):
    """The mask could not be computed; the message has the reason."""


class MaskLate(Exception):
    """The mask is still being computed, and its request waits for it alone."""


class SharedLexer:
    """State shared by copies of a compiled grammar: a lexer behind a lock of the library.

    The library holds the lock while it computes a mask. Accepting a token waits for the lock, and holds the
    interpreter lock meanwhile. So while a mask of one copy is stuck, the other copies must not be used.
    """

    __slots__ = ("num_stuck",)

    def __init__(self) -> None:
        self.num_stuck = 0  # masks that are no longer awaited


class MaskJob:
    """A mask to compute, and then the masks after drafts. The job owns the matcher until the job is done.
    ``behind[k]`` is the mask after the first k + 1 accepted drafts, computed with a copy of the matcher. The
    list may be shorter: an expensive or forbidden draft ends it."""

    __slots__ = (
        "_began",
        "_clock",
        "_drafts",
        "_matcher",
        "behind",
        "bits",
        "budget",
        "done",
        "error",
        "is_late",
        "is_left",
        "is_needed",
        "is_put_off",
        "lexer",
        "submitted_at",
    )

    def __init__(
        self,
        matcher: LLMatcher,
        budget: MaskBudget,
        lexer: SharedLexer,
        *,
        drafts: Sequence[int] = (),
        bits: bytes | None = None,
    ) -> None:
        """Create a job. ``bits``: the first mask, if known."""
        self._matcher = matcher
        self._drafts = drafts
        self.lexer = lexer
        self.budget = budget
        self.bits = bits
        self.behind: list[bytes] = []
        self.error: str | None = None
        self.done = threading.Lock()  # locked until the job is done; cheaper than an event
        self.done.acquire()
        self.is_left = False  # the request stopped waiting during the computation
        self.is_needed = True
        self.is_late = False  # steps go on without the request that waits for this mask
        self.is_put_off = False  # not begun, because its request is over its budget
        self.submitted_at = time.monotonic()
        self._clock: int | None = None
        self._began: float | None = None

    def run(self) -> None:
        self._clock = _thread_clock()
        self._began = began = _now(self._clock)
        try:
            if self.is_needed and self.bits is None:
                self.bits = self._matcher.compute_bitmask()
                if self._matcher.is_error():
                    self.error = first_line(self._matcher.get_error())
        except BaseException as error:  # the library's own panics, too
            self.error = first_line(str(error)) or type(error).__name__
        taken = _now(self._clock) - began
        self.budget.charge(taken)
        if self._drafts and self.error is None and taken < SLOW_MASK_S:
            self._look_behind_drafts(self._clock)
        self.done.release()

    def _look_behind_drafts(self, clock: int | None) -> None:
        matcher = self._matcher.deep_copy()
        for draft in self._drafts:
            if not (self.is_needed and self.budget.has_drafts):
                break
            self._began = began = _now(clock)
            try:
                matcher.consume_token(draft)
                bits = matcher.compute_bitmask()
                held = not matcher.is_error()
            except BaseException:  # the library's own panics, too
                held = False
            taken = _now(clock) - began
            self.budget.charge_drafts(taken)
            if not held:
                break
            self.behind.append(bits)
            if taken >= SLOW_MASK_S:
                break

    @property
    def is_over(self) -> bool:
        """Whether the mask is not done and steps go on without its request."""
        if not self.done.locked():
            return False
        return self.is_late or self.is_put_off or self.budget.is_over(self.taken_s())

    def taken_s(self) -> float:
        """CPU seconds so far; wall seconds on systems without CPU clocks of threads."""
        began = self._began
        try:
            return 0.0 if began is None else _now(self._clock) - began
        except OSError:  # the thread has ended
            return 0.0


def _thread_clock() -> int | None:
    return time.pthread_getcpuclockid(threading.get_ident()) if _HAS_THREAD_CLOCKS else None


def _now(clock: int | None) -> float:
    return time.monotonic() if clock is None else time.clock_gettime(clock)


_Jobs: TypeAlias = "queue.PriorityQueue[tuple[float, int, MaskJob | None]]"


class MaskThreads:
    """Threads that compute masks, started with the first mask. ``submit`` and ``wait`` are called on the
    engine's thread, and ``close`` on any."""

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.PriorityQueue()
        self._put_off: _Jobs = queue.PriorityQueue()  # jobs of requests over their budgets
        self._closed = threading.Event()
        self._has_feeder = False
        self._number = itertools.count()
        self._lock = threading.Lock()
        self._num_threads = 0  # threads that take jobs
        self._num_stuck = 0
        self._waited_s = 0.0
        self._waited_at = 0.0

    @property
    def num_stuck(self) -> int:
        return self._num_stuck

    def submit(self, job: MaskJob, *, may_be_put_off: bool = False) -> None:
        """Compute a mask; requests with the most budget left come first.

        ``may_be_put_off``: the mask may be begun later if its request is over its budget.
        """
        if self._num_threads < NUM_THREADS:
            self._fill_up()
        if may_be_put_off and self._is_spent(job.budget):
            job.is_put_off = True
            self._put(self._put_off, job)
            self._start_feeder()
        else:
            self._put(self._jobs, job)

    def _is_spent(self, budget: MaskBudget) -> bool:
        return budget.is_spent or (budget.is_half_spent and self._waited_too_long())

    def _put(self, jobs: _Jobs, job: MaskJob | None) -> None:
        used_s = math.inf if job is None else job.budget.used_s
        jobs.put((used_s, next(self._number), job))

    def has_failed(self, job: MaskJob) -> str | None:
        """Return why to stop waiting for a mask that is not done; None to go on waiting."""
        if not self._num_threads:
            why = "the engine was stopped" if self._closed.is_set() else "too many other masks are stuck"
            return f"its mask cannot be computed: {why}"
        waited_s = 0.0 if job.is_put_off else time.monotonic() - job.submitted_at
        if job.lexer.num_stuck or job.taken_s() > MAX_MASK_S or waited_s > MAX_WAIT_S:
            return f"it is too ambiguous or too large to follow: a mask took more than {MAX_MASK_S:g} s"
        return None

    def wait(self, job: MaskJob, *, may_be_late: bool = False) -> bytes:
        """Return the mask's bits. Raises MaskFailed if there are none.

        ``may_be_late``: raise MaskLate rather than wait for a mask that takes long."""
        if not job.done.acquire(blocking=False):
            self._wait(job, may_be_late=may_be_late)
        job.done.release()
        if job.error is not None:
            raise MaskFailed(job.error)
        assert job.bits is not None, "a finished job has no failure"
        return job.bits

    def close(self) -> None:
        """End the threads, each after its job; returns at once. Later jobs fail."""
        with self._lock:
            for _ in range(self._num_threads):
                self._put(self._jobs, None)
            self._closed.set()
            self._put(self._put_off, None)

    def _wait(self, job: MaskJob, *, may_be_late: bool) -> None:
        began = time.monotonic()
        if job.is_put_off and not may_be_late:
            self._begin(job)  # a step that is already submitted includes its row
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
        """Stop waiting for a job; its thread counts as stuck until the job is done."""
        with self._lock:
            job.is_needed = False  # in case it has not begun
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
        """Begin the jobs that were put off: one after the other, with pauses."""
        while (job := self._put_off.get()[-1]) is not None and not self._closed.is_set():
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
        """Begin a job that was put off, unless it has begun already."""
        with self._lock:
            if not job.is_put_off:
                return False
            job.submitted_at, job.is_late, job.is_put_off = time.monotonic(), True, False
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
