"""Limits of the system on a server: descriptors, and time to end; of CPUs see ``kernels.cpus``."""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import resource
import sys
import threading

from octavo.kernels.cpus import cpu_quota as cpu_quota

logger = logging.getLogger(__name__)

LAST_RESORT_S = 1.0  # later than a deadline


def raise_descriptor_limit() -> None:
    """Let this process open as many files and connections as it may: each client takes one, and at the
    usual soft limit of 1,024 the probes would fail before anything else does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS: "unlimited" is more than it allows
        logger.info("at most %d descriptors, the limit of %d cannot be had: %s", soft, hard, error)


class ExitDeadline:
    """Ends the process when it does not end by itself: a step, a thread or a disk may hang.

    code   exit code of a command that has ended; the interpreter is then not torn down, which may take longer
           than the deadline allows, and in which no other thread runs any more
    """

    def __init__(self) -> None:
        self.code: int | None = None
        self._timer: threading.Timer | None = None
        atexit.register(self._skip_teardown)  # first, so that it is called last

    def start(self, seconds: float, code: int) -> None:
        """The process ends with ``code`` after so many seconds at most; replaces an earlier deadline."""
        self.cancel()
        self._timer = threading.Timer(seconds, _leave, (seconds, code))
        self._timer.daemon = True
        self._timer.start()
        if sys.__stderr__ is not None:  # needs no interpreter lock, should somebody keep that
            faulthandler.dump_traceback_later(seconds + LAST_RESORT_S, exit=True, file=sys.__stderr__)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            faulthandler.cancel_dump_traceback_later()

    def _skip_teardown(self) -> None:
        if self._timer is not None and self.code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)


def _leave(seconds: float, code: int) -> None:
    message = f"octavo serve: not ended {seconds:g} s after the signal; leaving at once"
    print(message, file=sys.stderr, flush=True)
    os._exit(code)
