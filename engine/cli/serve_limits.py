"""System limits of a server: file descriptors, and time to exit; for CPUs see ``kernels.cpus``."""

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

LAST_RESORT_S = 1.0  # seconds after the deadline until faulthandler ends the process


def raise_descriptor_limit() -> None:
    """Raise the process's limit of open files and connections to its maximum. Each client takes one, and with
    the usual soft limit of 1,024 the probes would fail first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS does not allow "unlimited"
        logger.info("the limit of open files is %d and cannot be raised to %d: %s", soft, hard, error)


class ExitDeadline:
    """Ends the process if it does not end by itself, because a step, a thread or a disk may hang.

    code   exit code of the finished command; after ``start``, the interpreter then exits without teardown,
           which could take longer than the deadline
    """

    def __init__(self) -> None:
        self.code: int | None = None
        self._timer: threading.Timer | None = None
        atexit.register(self._skip_teardown)  # registered first, so that it is called last

    def start(self, seconds: float, code: int) -> None:
        """End the process with ``code`` after ``seconds`` at most; replaces an earlier deadline."""
        self.cancel()
        self._timer = threading.Timer(seconds, _leave, (seconds, code))
        self._timer.daemon = True
        self._timer.start()
        if sys.__stderr__ is not None:  # needs no interpreter lock, which another thread may hold
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
    message = f"octavo serve: still running {seconds:g} s after the signal; exiting at once"
    print(message, file=sys.stderr, flush=True)
    os._exit(code)
