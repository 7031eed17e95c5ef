"""The end of a process that does not end by itself."""

from __future__ import annotations

import logging
import os
import sys
import threading

logger = logging.getLogger(__name__)


def end_process_after(seconds: float) -> None:
    """Leave with exit code 1 unless the process has ended by itself in time: Python waits for the threads of
    executors at its exit, and a step, a lock or a disk that hangs would keep it for ever."""

    def end() -> None:
        logger.error("the process did not end within %g s of being told to; it ends now", seconds)
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.name = "octavo-last-resort"
    timer.daemon = True
    timer.start()
