"""The thread that saves and loads prompts and caches, one at a time."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

IDLE_S = 1.0  # seconds without a call after which the thread ends


class SnapshotWorker:
    """Runs calls one after the other on its own thread, so that requests keep theirs.

    The thread is a daemon, so a hanging disk cannot keep the server from ending.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # the thread, while it runs

    async def run(self, call: Callable[[], ResultT]) -> ResultT:
        """Return or raise the result of ``call``. A started call runs to its end even if this is
        cancelled."""
        done: Future[ResultT] = Future()
        with self._lock:
            self._calls.put((done, call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="octavo-snapshots", daemon=True)
                self._thread.start()
        return await asyncio.wrap_future(done)

    def _work(self) -> None:
        while True:
            try:
                done, call = self._calls.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if not self._calls.empty():
                        continue
                    self._thread = None
                    return
            if not done.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # handled by the caller
                done.set_exception(error)
            else:
                done.set_result(result)
