from __future__ import annotations

import functools
import hashlib
import itertools
import re
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from ..api.errors import InvalidRequest
from ..api.structured_output import StructuredOutput
from .compile_pool import Compiled, CompileJob, CompilePool
from .constraint import TOO_COSTLY, Constraint, ConstraintFailed
from .library_tokenizer import TokenizerMaker
from .limits import CompileLimits
from .mask_threads import MaskThreads
from .trial_compiler import Refused

if TYPE_CHECKING:
    from ..tokenizer.tokenizer import Tokenizer


MAX_CACHED = 64
MAX_CACHED_CHARACTERS = 2**17  # total characters of cached sources
MAX_CACHED_CPU_S = 2.0  # total CPU seconds of compiling cached sources
MAX_CACHED_REFUSALS = 1024
CLOSE_TIMEOUT_S = 5.0
_SCHEMA_IN_GRAMMAR = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: (.*?) \d+ \| .*", re.DOTALL)

_Key: TypeAlias = tuple[str, str]


class _Cached(NamedTuple):
    constraint: Constraint
    cpu_s: float


class ConstraintCompiler:
    """Compiles and caches constraints for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, limits: CompileLimits | None = None) -> None:
        self._vocab_size = vocab_size
        self._end_ids = np.array(sorted(id for id in tokenizer.eos_ids if id < vocab_size), np.intp)
        self._tokenizer = TokenizerMaker(
            tokenizer, vocab_size=vocab_size, end_ids=tuple(self._end_ids.tolist())
        )
        self.pool = CompilePool(self._tokenizer, limits or CompileLimits())
        self._mask_threads = MaskThreads()
        self._cache: OrderedDict[_Key, _Cached] = OrderedDict()
        self._refusals: OrderedDict[bytes, str] = OrderedDict()
        self._under_way: dict[_Key, CompileJob] = {}
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close, self.pool, self._mask_threads)

    def prepare(self) -> None:
        """Load the library's tokenizer in advance, which may take a second."""
        try:
            self._tokenizer.get()
        except InvalidRequest:
            return

    def compile(self, structured: StructuredOutput, tenant: str = "") -> Constraint:
        """Return a new constraint. Raises InvalidRequest, RequestFailed, Overloaded or EngineStopping."""
        constraint = self.begin(structured, tenant)
        try:
            return constraint.result()
        finally:
            self.forget(constraint)

    def begin(self, structured: StructuredOutput, tenant: str = "") -> Future[Constraint]:
        """Start compiling for one request. Raises Overloaded or EngineStopping."""
        key, constraint = (structured.kind, structured.source), Future[Constraint]()
        with self._lock:
            if (found := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                if found.constraint.is_stuck:
                    raise InvalidRequest(f"{structured.kind} cannot be used now: {TOO_COSTLY}; simplify it")
                constraint.set_result(found.constraint.copy())
                return constraint
            if (reason := self._refusals.get(_digest(key))) is not None:
                constraint.set_exception(InvalidRequest(reason))
                return constraint
            job, is_new = self._under_way.get(key), False
            if job is None:
                job, is_new = CompileJob(*key), True
                self.pool.submit(job, tenant)
                self._under_way[key] = job
            job.waiting.add(constraint)
        if is_new:
            job.outcome.add_done_callback(functools.partial(self._on_done, job))
        return constraint

    def forget(self, constraint: Future[Constraint]) -> None:
        with self._lock:
            job = next((each for each in self._under_way.values() if constraint in each.waiting), None)
            if job is None:
                return
            job.waiting.discard(constraint)
            if job.waiting:
                return
            del self._under_way[job.kind, job.source]
        self.pool.cancel(job)

    def close(self) -> None:
        """End the helper processes and the threads. Waiting requests fail."""
        self._finalizer()

    def _on_done(self, job: CompileJob, outcome: Future[Compiled | Refused]) -> None:
        made, error = None, outcome.exception()
        if error is None:
            try:
                made = self._constraint_or_refusal(job, outcome.result())
            except InvalidRequest as refusal:
                error = refusal
        with self._lock:
            if self._under_way.get((job.kind, job.source)) is job:
                del self._under_way[job.kind, job.source]
            waiting, job.waiting = job.waiting, set()
        for constraint in waiting:
            if not constraint.set_running_or_notify_cancel():
                continue
            if made is not None:
                constraint.set_result(made.copy())
            else:
                constraint.set_exception(error)

    def _constraint_or_refusal(self, job: CompileJob, outcome: Compiled | Refused) -> Constraint:
        key = (job.kind, job.source)
        if isinstance(outcome, Compiled):
            made = Constraint(
                outcome.matcher,
                job.kind,
                bits=outcome.first_mask,
                threads=self._mask_threads,
                vocab_size=self._vocab_size,
                end_ids=self._end_ids,
            )
            if (reason := self._unfit(made)) is None:
                self._keep(key, _Cached(made, outcome.cpu_s))
                return made
            outcome = Refused(reason)
        reason = _SCHEMA_IN_GRAMMAR.sub(
            r"a JSON schema in it, such as the parameters of a forced tool: \1", outcome.reason
        )
        refusal = f"{job.kind} cannot be used: {reason}; correct it or leave it out"
        if outcome.keeps:
            with self._lock:
                self._refusals[_digest(key)] = refusal
                while len(self._refusals) > MAX_CACHED_REFUSALS:
                    self._refusals.popitem(last=False)
        raise InvalidRequest(refusal)

    def _unfit(self, made: Constraint) -> str | None:
        try:
            beginnings = np.flatnonzero(made.allowed(may_end=False))
        except ConstraintFailed as error:
            return str(error)
        only_ends = np.isin(beginnings, self._end_ids).all()
        return "it matches only the empty output" if only_ends else None

    def _keep(self, key: _Key, made: _Cached) -> None:
        with self._lock:
            self._cache[key] = made
            while len(self._cache) > 1 and not self._fits_cache():
                self._cache.popitem(last=False)

    def _fits_cache(self) -> bool:
        return (
            len(self._cache) <= MAX_CACHED
            and sum(len(source) for _, source in self._cache) <= MAX_CACHED_CHARACTERS
            and sum(cached.cpu_s for cached in self._cache.values()) <= MAX_CACHED_CPU_S
        )


def _digest(key: _Key) -> bytes:
    return hashlib.sha256("\0".join(key).encode(errors="surrogatepass")).digest()


def _close(pool: CompilePool, mask_threads: MaskThreads) -> None:
    mask_threads.close()
    pool.close()
    pool.join(CLOSE_TIMEOUT_S)


class GrammarDesk:
    """Stores compiled grammars by number. Thread-safe."""

    def __init__(self, compiler: ConstraintCompiler) -> None:
        self.compiler = compiler
        self._kept: dict[int, Constraint] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def begin(self, structured: StructuredOutput, tenant: str = "") -> Future[int]:
        """Start compiling for one request. The result is the number of the grammar."""
        constraint = self.compiler.begin(structured, tenant)
        ticket: Future[int] = Future()

        def done(outcome: Future[Constraint]) -> None:
            if outcome.cancelled() or not ticket.set_running_or_notify_cancel():
                return
            if (error := outcome.exception()) is not None:
                ticket.set_exception(error)
                return
            with self._lock:
                number = next(self._numbers)
                self._kept[number] = outcome.result()
            ticket.set_result(number)

        def forget(_: Future[int]) -> None:
            if ticket.cancelled():
                self.compiler.forget(constraint)

        ticket.add_done_callback(forget)
        constraint.add_done_callback(done)
        return ticket

    def take(self, ticket: int) -> Constraint:
        with self._lock:
            return self._kept.pop(ticket)

    def drop(self, ticket: int | None) -> None:
        with self._lock:
            self._kept.pop(ticket, None)  # type: ignore[arg-type]

    def prepare(self) -> None:
        self.compiler.prepare()

    def close(self) -> None:
        self.compiler.close()
