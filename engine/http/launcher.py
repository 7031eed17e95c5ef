"""The router's own process: ends with the server that started it, then becomes the router.

    python -m octavo.engine.http.launcher PARENT

reads its options as one line of JSON, a list of strings, from standard input: the command line of a process
can be read by everybody on the machine, and options hold keys. Standard input then stays open, unread: its
end is the server's end.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # prctl(2)
_CHUNK = 4096


def main(argv: Sequence[str]) -> None:
    """Run the router until it ends; never longer than the process ``argv[0]`` lives."""
    parent = int(argv[0])
    end_with_parent(parent, by_kernel=sys.platform == "linux")
    options = json.loads(_read_line(0))
    from smg.cli import main as run_router

    run_router(["launch", *options])


def end_with_parent(parent: int, *, by_kernel: bool) -> None:
    """From now on this process is killed when ``parent`` ends, however that ends.

    by_kernel   Linux sends the signal itself. Elsewhere a small process waits for the end of standard
                input, whose other side nobody but the server holds.
    """
    if by_kernel:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        _watch_standard_input()
    if os.getppid() != parent:  # it ended before it was watched
        os._exit(1)


def _watch_standard_input() -> None:
    router = os.getpid()
    options, copy = os.pipe()  # the watcher alone reads standard input, and hands on the first line
    if os.fork():
        os.close(copy)
        os.dup2(options, 0)
        os.close(options)
        return
    os.close(options)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(copy, _read_line(0) + b"\n")
    os.close(copy)
    while os.read(0, _CHUNK):
        pass
    if os.getppid() == router:  # it has not ended by itself, and its number is not another process's
        os.kill(router, signal.SIGKILL)
    os._exit(0)


def _read_line(descriptor: int) -> bytes:
    """Up to the first line break, and nothing after it."""
    line = b""
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return line


if __name__ == "__main__":
    main(sys.argv[1:])
