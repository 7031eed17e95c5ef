"""Helper process that test-compiles schemas and grammars. A hostile source may crash only this process.

Messages to this process (<-) and from it (->):

<- {"tokenizer": arguments of make_tokenizer, "limits": {...}}   once
-> {"ready": true} or {"refused": why}
<- {"kind", "source"}
-> {"grammar": grammar for llguidance, "cpu_s"} or {"refused": why}
"""

from __future__ import annotations

import math
import os
import queue
import resource
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ..memory.malloc import give_memory_back
from .grammar import grammar_of
from .helper_process import received, send
from .library import first_line, make_matcher, make_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

NICENESS = 5


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    os.nice(NICENESS)
    messages, inbox = received(connection), queue.SimpleQueue[dict[str, Any]]()
    setup = next(messages)
    threading.stack_size(setup["limits"]["stack_bytes"])
    threading.Thread(target=_compile_all, args=(setup, inbox, connection), daemon=True).start()
    for message in messages:
        inbox.put(message)
    os._exit(0)


def _compile_all(
    setup: dict[str, Any], inbox: queue.SimpleQueue[dict[str, Any]], connection: Connection
) -> None:
    limits = setup["limits"]
    try:
        tokenizer = make_tokenizer(**setup["tokenizer"])
    except BaseException as error:  # the library raises ValueError or panics
        send(connection, {"refused": f"it cannot read the tokenizer: {first_line(str(error))}"})
        return
    _limit_memory(limits["memory_bytes"])
    send(connection, {"ready": True})
    while True:
        job = inbox.get()
        _limit_cpu(limits["cpu_s"])
        answer = _answer(tokenizer, job, limits["compile_s"], first_mask_s=limits["first_mask_s"])
        send(connection, answer)
        del job, answer
        give_memory_back()


def _answer(
    tokenizer: LLTokenizer, job: dict[str, Any], compile_s: float, *, first_mask_s: float
) -> dict[str, Any]:
    began = time.thread_time()
    try:
        grammar = grammar_of(job["kind"], job["source"])
        mask_s, error = _try_out(tokenizer, grammar)
        if mask_s > first_mask_s and not error:  # try again, because the machine may be busy
            again, error = _try_out(tokenizer, grammar)
            mask_s = min(mask_s, again)
        if error:
            return {"refused": error}
    except MemoryError:
        return {"refused": "compiling it takes too much memory"}
    except BaseException as error:  # a client's source must not end this process
        return {"refused": first_line(str(error)) or type(error).__name__}
    cpu_s = time.thread_time() - began
    if cpu_s > compile_s:
        return {"refused": f"compiling it takes {cpu_s:.1f} s, but at most {compile_s:g} s are allowed"}
    if mask_s > first_mask_s:
        return {
            "refused": f"the mask of its first token takes {mask_s * 1e3:.0f} ms, but at most "
            f"{first_mask_s * 1e3:g} ms are allowed; allow fewer or shorter strings"
        }
    return {"grammar": grammar, "cpu_s": cpu_s}


def _try_out(tokenizer: LLTokenizer, grammar: str) -> tuple[float, str]:
    matcher = make_matcher(tokenizer, grammar)
    began = time.thread_time()
    if not matcher.is_error():
        matcher.compute_bitmask()
    mask_s = time.thread_time() - began
    error = first_line(matcher.get_error()) or "it is not well formed" if matcher.is_error() else ""
    copy = matcher.deep_copy()
    del matcher, copy  # freeing a matcher may overflow the stack
    return mask_s, error


def _limit_cpu(seconds: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time()) + seconds
    resource.setrlimit(
        resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
    )


def _limit_memory(added: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    with open("/proc/self/statm", "rb") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or size + added < hard:
        resource.setrlimit(resource.RLIMIT_AS, (size + added, hard))


if __name__ == "__main__":
    main()
