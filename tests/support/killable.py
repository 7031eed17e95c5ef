"""Processes that write into a folder of pages until they are killed: shards alone, or whole engines.

``python killable.py MODE FOLDER``: for each line of input a number, and a child that begins from it. Its
id is printed when it begins, what it has finished while it lives, and "ended" when it does not any more.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fakes import FakeCore, small_config
from octavo.block_manager import FullAttention, KVGroupSpec, SlidingWindow
from octavo.engine import LLM, SamplingParams
from octavo.engine.kv_store.folder import ShardFolder
from page_shards import make_kind, make_run

GROUPS = {
    "one pool": (FullAttention(num_pages=64),),
    "windows": (
        FullAttention(num_pages=64),
        SlidingWindow(num_pages=40, window=10),
        SlidingWindow(num_pages=40, window=6, keep=5),
    ),
}
FOUR_TOKENS = SamplingParams(max_tokens=4, ignore_eos=True)


def prompt_of(number: int) -> list[int]:
    """One of endless prompts, of which each three share the first half."""
    rng = random.Random(number // 3)
    shared = [rng.randrange(250) for _ in range(40)]
    return shared + [number % 250] * (20 + number % 17)


def tell(what: object) -> None:
    """Print one line in one write: print makes two of it when Python does not buffer, and a process that is
    killed between them leaves a line for the next writer to go on with."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def write_shards(folder: Path, first: int) -> None:
    """Chains of three pages, one line of output for each page that is there."""
    shards = ShardFolder(folder, make_kind(), max_bytes=1 << 30)
    for number in itertools.count(first):
        for index in range(3):
            digest, run = make_run(number, index, shards.kind)
            shards.put(digest, run)
            tell(digest.hex())


def serve(folder: Path, first: int, groups: tuple[KVGroupSpec, ...]) -> None:
    """An engine that serves a prompt after the other and says which; its pages are written meanwhile."""
    with LLM(small_config(cache_dir=folder), core_factory=FakeCore(groups=groups)) as llm:
        for number in itertools.count(first):
            llm.generate([prompt_of(number)], FOUR_TOKENS, progress=False)
            tell(number)


MODES: dict[str, Callable[[Path, int], None]] = {
    "shards": write_shards,
    "one pool": lambda folder, first: serve(folder, first, GROUPS["one pool"]),
    "windows": lambda folder, first: serve(folder, first, GROUPS["windows"]),
}


@contextmanager
def nursery(mode: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has imported everything and starts a child for each line, within milliseconds."""
    process = subprocess.Popen(
        [sys.executable, __file__, mode, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its children as well
        process.communicate()


def kill_one(process: subprocess.Popen[str], first: int, rng: random.Random, *, most_s: float) -> set[str]:
    """Let a child work for a moment, kill it, and return what it has said that it finished."""
    into, out = process.stdin, process.stdout
    assert into is not None
    assert out is not None

    def hear() -> str:
        line = out.readline()
        assert line.endswith("\n"), f"the processes that write ended with {line!r} as their last words"
        return line[:-1]

    print(first, file=into, flush=True)
    pid = int(hear())
    said = [hear() for _ in range(rng.randrange(8))]
    time.sleep(rng.random() * most_s)
    os.kill(pid, signal.SIGKILL)
    return {*said, *iter(hear, "ended")}


def main(mode: str, folder: Path) -> None:
    for line in sys.stdin:
        if child := os.fork():
            os.waitpid(child, 0)
            tell("ended")
        else:
            tell(os.getpid())
            MODES[mode](folder, int(line))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
