"""Threads that compile schemas and grammars.

A helper process compiles each source first, under limits of time, memory and stack. If that succeeds, the
source is compiled again in this process.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from ..api.errors import EngineStopping, OctavoError, Overloaded, RequestFailed
from .helper_process import HelperUnavailable
from .library import first_line, make_matcher
from .library_tokenizer import TokenizerMaker
from .limits import CompileLimits
from .trial_compiler import Accepted, Refused, TrialCompiler

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from .constraint import Constraint


Item = TypeVar("Item")


@dataclass(kw_only=True)
class TenantQueue(Generic[Item]):
    """A FIFO queue per tenant, served in rotation. Thread-safe."""

    max_items: int
    max_per_tenant: int
    _waiting: OrderedDict[str, deque[Item]] = field(default_factory=OrderedDict)
    _is_closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, item: Item, tenant: str) -> None:
        """Add an item. Raises Overloaded if there are too many items."""
        with self._changed:
            mine = self._waiting.get(tenant, ())
            for number, most, whose in (
                (len(mine), self.max_per_tenant, "of yours "),
                (len(self), self.max_items, ""),
            ):
                if number >= most:
                    raise Overloaded(
                        f"{number} schemas and grammars {whose}are waiting to be compiled, but at most "
                        f"{most} are allowed; try again later",
                        waiting_compilations=number,
                        max_waiting_compilations=most,
                    )
            self._waiting.setdefault(tenant, deque()).append(item)
            self._changed.notify()

    def take(self) -> Item | None:
        """Wait for the next item; return None after ``close``."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            tenant, mine = self._waiting.popitem(last=False)
            item = mine.popleft()
            if mine:
                self._waiting[tenant] = mine
            return item

    def remove(self, item: Item) -> bool:
        """Remove an item and return whether it was still in the queue."""
        with self._changed:
            for tenant, mine in self._waiting.items():
                if item in mine:
                    mine.remove(item)
                    if not mine:
                        del self._waiting[tenant]
                    return True
        return False

    def close(self) -> list[Item]:
        """Close the queue and return the remaining items."""
        with self._changed:
            left = [item for mine in self._waiting.values() for item in mine]
            self._waiting.clear()
            self._is_closed = True
            self._changed.notify_all()
        return left


logger = logging.getLogger(__name__)

_stack_size_lock = threading.Lock()  # the stack size of new threads is a global setting


@dataclass(frozen=True, slots=True)
class Compiled:
    matcher: LLMatcher
    first_mask: bytes
    cpu_s: float


@dataclass(slots=True, eq=False)
class CompileJob:
    """A source to compile. ``waiting`` are the requests that share its outcome."""

    kind: str
    source: str
    outcome: Future[Compiled | Refused] = field(default_factory=Future)
    waiting: set[Future[Constraint]] = field(default_factory=set)
    helper: TrialCompiler | None = None
    is_cancelled: bool = False


class CompilePool:
    """Compiles jobs on up to ``limits.num_helpers`` threads. Thread-safe."""

    def __init__(self, tokenizer: TokenizerMaker, limits: CompileLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._queue: TenantQueue[CompileJob] = TenantQueue(
            max_items=limits.max_queued, max_per_tenant=limits.max_queued_per_tenant
        )
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_unfinished = 0
        self._is_closed = False
        self.helpers: list[TrialCompiler] = []

    def submit(self, job: CompileJob, tenant: str) -> None:
        """Queue a job. Raises Overloaded or EngineStopping."""
        with self._lock:
            if self._is_closed:
                raise EngineStopping("the engine was stopped, so schemas and grammars are no longer compiled")
            self._queue.put(job, tenant)
            self._num_unfinished += 1
            if len(self._threads) < min(self._num_unfinished, self._limits.num_helpers):
                self._start_thread()

    def cancel(self, job: CompileJob) -> None:
        """Cancel a job that no request waits for."""
        waited = self._queue.remove(job)
        with self._lock:
            job.is_cancelled = True
            self._num_unfinished -= waited
            if job.helper is not None:
                job.helper.interrupt()
        if waited:
            job.outcome.set_exception(_cancelled())

    def close(self) -> None:
        """End the helper processes and the threads, without waiting."""
        with self._lock:
            self._is_closed = True
            left = self._queue.close()
            for helper in self.helpers:
                helper.close()
        for job in left:
            job.outcome.set_exception(_cancelled())

    def join(self, timeout_s: float) -> None:
        """After ``close``, wait for the helper processes to end."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _start_thread(self) -> None:
        name = f"octavo-grammars-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        with _stack_size_lock:
            earlier = threading.stack_size(self._limits.own_stack_bytes)
            try:
                thread.start()
            finally:
                threading.stack_size(earlier)
        self._threads.append(thread)

    def _work(self) -> None:
        helper: TrialCompiler | None = None
        try:
            while (job := self._queue.take()) is not None:
                try:
                    helper = helper or self._make_helper()
                    outcome = self._compile(helper, job)
                except OctavoError as error:
                    job.outcome.set_exception(error)
                except BaseException as error:  # such as a panic of the library
                    logger.exception("compiling %s failed", job.kind)
                    job.outcome.set_exception(RequestFailed(f"compiling {job.kind} failed: {error}"))
                else:
                    job.outcome.set_result(outcome)
                    del outcome
                finally:
                    del job
                    with self._lock:
                        self._num_unfinished -= 1
        finally:
            if helper is not None:
                helper.reap()

    def _make_helper(self) -> TrialCompiler:
        helper = TrialCompiler(self._tokenizer.get().setup, self._limits)
        with self._lock:
            self.helpers.append(helper)
            if self._is_closed:
                helper.close()
        return helper

    def _compile(self, helper: TrialCompiler, job: CompileJob) -> Compiled | Refused:
        tried = self._try(helper, job)
        if isinstance(tried, Refused):
            return tried
        matcher = make_matcher(self._tokenizer.get().made, tried.grammar)
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            return Refused(first_line(matcher.get_error()))
        return Compiled(matcher, mask, tried.cpu_s)

    def _try(self, helper: TrialCompiler, job: CompileJob) -> Refused | Accepted:
        for is_last in (False, True):
            with self._lock:
                if job.is_cancelled:
                    raise _cancelled()
                job.helper = helper
            try:
                return helper.try_compile(job.kind, job.source, is_wanted=lambda: not job.is_cancelled)
            except HelperUnavailable as error:
                if self._is_closed or job.is_cancelled:
                    raise _cancelled() from error
                if is_last:
                    raise RequestFailed(f"{job.kind} could not be compiled: {error}; try again") from error
            finally:
                with self._lock:
                    job.helper = None
        raise AssertionError("the last attempt returns or raises")


def _cancelled() -> EngineStopping:
    return EngineStopping("compiling was cancelled, because its requests ended or the engine was stopped")
