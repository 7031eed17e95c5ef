from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import resource
import sys
import threading

logger = logging.getLogger(__name__)

LAST_RESORT_S = 1.0


def raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS does not allow "unlimited"
        logger.info("the limit of %d open files cannot be raised to %d: %s", soft, hard, error)


class ExitDeadline:
    """Ends the process if it does not end by itself in time."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._timer: threading.Timer | None = None
        atexit.register(self._skip_teardown)

    def start(self, seconds: float, code: int) -> None:
        """End the process with ``code`` after at most ``seconds``. Replaces an earlier deadline."""
        self.cancel()
        self._timer = threading.Timer(seconds, _leave, (seconds, code))
        self._timer.daemon = True
        self._timer.start()
        if sys.__stderr__ is not None:
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
