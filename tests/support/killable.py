"""Processes that write into a page folder until they are killed.

    python killable.py MODE FOLDER

Each input line is a number that starts a child. It prints a child's process ID, its finished work, and
"ended" at its end."""

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
    """Return a prompt; each group of three prompts shares the first half."""
    rng = random.Random(number // 3)
    shared = [rng.randrange(250) for _ in range(40)]
    return shared + [number % 250] * (20 + number % 17)


def tell(what: object) -> None:
    """Print one line in one write, because a killed process could leave half a line."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def write_shards(folder: Path, first: int) -> None:
    """Write chains of three pages, with one output line per finished page."""
    shards = ShardFolder(folder, make_kind(), max_bytes=1 << 30)
    for number in itertools.count(first):
        for index in range(3):
            digest, run = make_run(number, index, shards.kind)
            shards.put(digest, run)
            tell(digest.hex())


def serve(folder: Path, first: int, groups: tuple[KVGroupSpec, ...]) -> None:
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
        os.killpg(process.pid, signal.SIGKILL)  # also ends its children
        process.communicate()


def kill_one(process: subprocess.Popen[str], first: int, rng: random.Random, *, most_s: float) -> set[str]:
    """Kill a child after a moment; return what it had finished."""
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
