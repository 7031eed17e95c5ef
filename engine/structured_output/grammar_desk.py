"""Compiled grammars, kept from a request's validation until its arrival at the core."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future

from ..api.structured_output import StructuredOutput
from .compiler import ConstraintCompiler
from .constraint import Constraint


class GrammarDesk:
    """Keeps each compiled grammar under a number, its ticket, which the request carries to the core. Every
    ticket is taken or dropped once. Thread-safe."""

    def __init__(self, compiler: ConstraintCompiler) -> None:
        self.compiler = compiler
        self._kept: dict[int, Constraint] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def begin(self, structured: StructuredOutput, tenant: str = "") -> Future[int]:
        """Start compiling for one request. The future may be cancelled, or have the outcome of
        ``ConstraintCompiler.begin``, whose immediate errors are raised here."""
        waits = self.compiler.begin(structured, tenant)
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
                self.compiler.forget(waits)

        ticket.add_done_callback(forget)
        waits.constraint.add_done_callback(done)
        return ticket

    def take(self, ticket: int) -> Constraint:
        """Return the grammar of a ticket."""
        with self._lock:
            return self._kept.pop(ticket)

    def drop(self, ticket: int | None) -> None:
        """Drop a ticket that was not taken."""
        with self._lock:
            self._kept.pop(ticket, None)  # type: ignore[arg-type]

    def prepare(self) -> None:
        self.compiler.prepare()

    def close(self) -> None:
        self.compiler.close()
