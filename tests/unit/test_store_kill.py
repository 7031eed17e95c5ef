"""A server may be killed at any moment: what lies in the folder then is whole, right, or dropped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import page_shards
from octavo.block_manager import Digest
from octavo.engine.store import folder as folder_module
from octavo.engine.store.folder import ShardFolder
from octavo.engine.store.page_files import read_run
from page_shards import bytes_of, make_kind


@contextmanager
def writers(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(Path(page_shards.__file__)), str(path)],
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


def kill_one(process: subprocess.Popen[str], first: int, rng: random.Random) -> set[str]:
    """Let a process write for a moment, kill it, and return the digests it has announced."""
    into, out = process.stdin, process.stdout
    assert into is not None
    assert out is not None
    print(first, file=into, flush=True)
    pid = int(out.readline())
    announced = [out.readline().strip() for _ in range(rng.randrange(8))]
    time.sleep(rng.random() * 0.004)
    os.kill(pid, signal.SIGKILL)
    announced += iter(lambda: out.readline().strip(), "ended")
    return set(announced)


@pytest.mark.parametrize("kills", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_random_moments(kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, kind = random.Random(kills), make_kind()
    announced: set[str] = set()
    with writers(tmp_path) as process:
        for number in range(kills):
            announced |= kill_one(process, rng.randrange(number + 1) * 2, rng)  # some is written again
            found = {path.stem: path for path in tmp_path.rglob("*.safetensors")}
            assert announced <= found.keys(), "what was there is there"
            for name, path in found.items():
                run = read_run(path)  # raises for what is not whole
                np.testing.assert_array_equal(
                    run.parts[0].pages[0], bytes_of(Digest(bytes.fromhex(name)), kind)
                )
    assert len(announced) > kills
    unfinished = [path for path in tmp_path.rglob(".*") if path.is_file()]
    assert len(unfinished) <= kills
    monkeypatch.setattr(folder_module, "STALE_S", -1.0)
    ShardFolder(tmp_path, kind, max_bytes=1 << 30).prune()
    assert {path.stem for path in tmp_path.rglob("*") if path.is_file()} == found.keys()
