from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import IO

from .examine import Examined

WORKER = "octavo_lab.architectures.worker"
TIME_LIMIT = 120.0  # seconds for one tiny model; most take less than one


def survey(
    names: Sequence[str], *, backend: str = "auto", time_limit: float = TIME_LIMIT
) -> Iterator[Examined]:
    """Yield the result of ``examine`` for each name, in order.

    An architecture that takes more than ``time_limit`` seconds or ends the process is "refused".
    """
    left = list(names)
    while left:
        for found in _one_process(tuple(left), backend, time_limit):
            yield found
            left.remove(found.architecture)


def _one_process(names: Sequence[str], backend: str, time_limit: float) -> Iterator[Examined]:
    command = [sys.executable, "-m", WORKER, backend, *names]
    lines: queue.Queue[str] = queue.Queue()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
        assert process.stdout is not None
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            for name in names:
                line = _next_line(lines, time_limit)
                if line:
                    yield Examined(**json.loads(line))
                    continue
                if line is None:
                    reason = f"loading it takes longer than {time_limit:g} s"
                else:
                    status = process.wait()
                    said.seek(0)
                    last = (said.read().strip().splitlines() or [""])[-1]
                    reason = f"loading it ends the process with status {status}: {last}"
                yield Examined(architecture=name, tier="refused", reason=reason)
                return
        finally:
            process.kill()
            process.wait()
            reader.join()
            process.stdout.close()


def _next_line(lines: queue.Queue[str], time_limit: float) -> str | None:
    try:
        return lines.get(timeout=time_limit)
    except queue.Empty:
        return None


def _read(stream: IO[str], lines: queue.Queue[str]) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")
