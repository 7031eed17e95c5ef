from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes import FakeCore, shard_store, small_config
from octavo.block_manager import Digest
from octavo.engine import LLM, SamplingParams
from octavo.engine.api.outputs import RequestOutput
from octavo.engine.kv_store import page_files, reader
from octavo.engine.kv_store.folder import ShardFolder
from octavo.engine.kv_store.page_files import BadPages, read_run, write_run
from octavo.engine.kv_store.page_runs import PagePart, PageRun
from page_shards import make_kind, make_run

PROMPT = [number % 250 for number in range(101)]
FOUR_TOKENS = SamplingParams(max_tokens=4, ignore_eos=True)


def generate(folder: Path, prompts: list[list[int]]) -> tuple[list[RequestOutput], FakeCore]:
    core = FakeCore()
    with LLM(small_config(cache_dir=folder), core_factory=core) as llm:
        return llm.generate(prompts, FOUR_TOKENS, progress=False), core


def dropped(core: FakeCore) -> dict[str, int]:
    assert core.core is not None
    counts = core.core._gauge_source.measure().store
    assert counts is not None
    return dict(counts.dropped)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the file through mmap would end the process with SIGBUS."""
    path = tmp_path / "x.safetensors"
    _, run = make_run(1, 0, make_kind())
    write_run(path, replace(run, parts=(PagePart((0,), np.zeros((1, 100_000), np.uint8)),)))
    empty = np.empty

    def cut(*args: Any) -> Any:
        os.truncate(path, path.stat().st_size // 2)
        return empty(*args)

    monkeypatch.setattr(np, "empty", cut)
    with pytest.raises(BadPages, match="could be read") as caught:
        read_run(path)
    assert caught.value.reason == "torn"


@pytest.mark.parametrize(
    "change",
    [{"page_size": "0"}, {"layers": "[" * 5000 + "]" * 5000}, {"formats": "[[]]"}, {"layers": "[[[]]]"}],
    ids=["page size 0", "nested", "no format", "no layer"],
)
def test_a_crafted_file_is_refused_whatever_it_says(tmp_path: Path, change: dict[str, str]) -> None:
    _, run = make_run(1, 0, make_kind())
    write_run(tmp_path / "good", run)
    raw = (tmp_path / "good").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    metadata = header["__metadata__"] | change
    metadata.pop("checksum")
    metadata["checksum"] = page_files._checksum(metadata, [run.parts[0].pages])
    header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    (tmp_path / "bad").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(BadPages) as caught:
        read_run(tmp_path / "bad")
    assert caught.value.reason == "foreign"


def test_a_medium_that_fails_costs_pages_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cold,), _ = generate(tmp_path, [PROMPT])

    def bad_sector(path: Path) -> PageRun:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr("octavo.engine.kv_store.folder.read_run", bad_sector)
    (again,), core = generate(tmp_path, [PROMPT])
    assert again.outputs == cold.outputs
    assert dropped(core) == {"read_failed": 1}


def test_many_damaged_pages_of_a_prompt_are_mended_by_one_request(tmp_path: Path) -> None:
    generate(tmp_path, [PROMPT])
    for path in shards(tmp_path):
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    (bad,), core = generate(tmp_path, [PROMPT])
    assert (bad.cached_tokens, dropped(core)) == (0, {"altered": 1})
    (mended,), core = generate(tmp_path, [PROMPT])
    assert (mended.cached_tokens, dropped(core)) == (100, {})


class Disk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.num_reads = 0
        self.num_hanging = 0
        get: Callable[..., object] = ShardFolder.get

        def held(*args: object, **options: object) -> object:
            self.num_reads += 1
            self.num_hanging += 1
            assert self.go.wait(60)
            self.num_hanging -= 1
            return get(*args, **options)

        monkeypatch.setattr(ShardFolder, "get", held)


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    monkeypatch.setattr(reader, "STALL_S", 0.2)
    disk = Disk(monkeypatch)
    yield disk
    disk.go.set()


def test_a_disk_that_hangs_is_waited_for_a_limited_time(tmp_path: Path, hung: Disk) -> None:
    hung.go.set()
    prompts = [[number, *PROMPT] for number in range(6)]
    cold, _ = generate(tmp_path, prompts)
    hung.go.clear()
    hung.num_reads = 0
    core = FakeCore()
    with LLM(small_config(cache_dir=tmp_path), core_factory=core) as llm:
        outputs = llm.generate(prompts, FOUR_TOKENS, progress=False)
        assert [output.outputs for output in outputs] == [output.outputs for output in cold]
        assert [output.cached_tokens for output in outputs] == [0] * 6
        assert hung.num_reads == 1, "one read hangs"
        assert core.core is not None
        assert shard_store(core.core).reader.is_stuck
    assert hung.num_hanging == 1, "closing must not wait for the disk"


def test_a_disk_that_answers_again_is_read_again(
    tmp_path: Path, hung: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung.go.set()
    generate(tmp_path, [PROMPT])
    hung.go.clear()
    core = FakeCore()
    with LLM(small_config(cache_dir=tmp_path), core_factory=core) as llm:
        llm.generate([[9, *PROMPT[1:]], PROMPT, [8, 7]], FOUR_TOKENS, progress=False)
        assert core.core is not None
        store = shard_store(core.core).reader
        hung.go.set()
        end = time.monotonic() + 20
        while store.is_stuck:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert not store.is_stuck
        monkeypatch.setattr(reader, "STALL_S", 60.0)
        core.core._blocks.flush()
        (warm,) = llm.generate([PROMPT], FOUR_TOKENS, progress=False)
    assert warm.cached_tokens == 100


def test_a_slow_disk_delays_a_prompt_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cold,), _ = generate(tmp_path, [PROMPT])
    get: Callable[..., object] = ShardFolder.get
    num_reads, gone_on = 0, threading.Event()

    def slow(*args: object, **options: object) -> object:
        nonlocal num_reads
        num_reads += 1
        if num_reads > 5:
            monkeypatch.setattr(reader, "WAIT_S", 0.0)
            assert gone_on.wait(60)
        return get(*args, **options)

    monkeypatch.setattr(ShardFolder, "get", slow)
    with LLM(small_config(cache_dir=tmp_path), core_factory=FakeCore()) as llm:
        try:
            (warm,) = llm.generate([PROMPT], FOUR_TOKENS, progress=False)
        finally:
            gone_on.set()
    assert warm.cached_tokens == 20
    assert warm.outputs == cold.outputs


def test_no_step_asks_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate(tmp_path, [PROMPT])
    asked: list[str] = []

    def spy(name: str) -> None:
        function = getattr(os, name)

        def counted(*args: object, **options: object) -> object:
            if threading.current_thread().name == "octavo-engine":
                asked.append(name)
            return function(*args, **options)

        monkeypatch.setattr(os, name, counted)

    core = FakeCore()
    with LLM(small_config(cache_dir=tmp_path), core_factory=core) as llm:
        for name in ("stat", "lstat", "scandir", "open", "utime"):
            spy(name)
        outputs = llm.generate([PROMPT, [7, *PROMPT]], FOUR_TOKENS, progress=False)
    assert [output.cached_tokens for output in outputs] == [100, 0]
    assert asked == []


def test_pages_that_another_server_wrote_are_found_after_a_refresh(tmp_path: Path) -> None:
    kind = make_kind()
    mine, other = (ShardFolder(tmp_path, kind, max_bytes=1 << 30) for _ in range(2))
    digest, run = make_run(1, 0, kind)
    other.put(digest, run)
    assert (mine.has(digest), other.has(digest)) == (False, True)
    mine.refresh()
    assert mine.has(digest)
    other.path(digest).unlink()
    mine.refresh()
    assert not mine.has(digest)


def test_a_full_disk_gives_up_its_oldest_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put: Callable[..., int] = ShardFolder.put

    def bounded(self: ShardFolder, digest: Digest, run: PageRun, group: int) -> int:
        if len(shards(tmp_path)) >= 30:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return put(self, digest, run, group)

    monkeypatch.setattr(ShardFolder, "put", bounded)
    monkeypatch.setattr("octavo.engine.kv_store.writer.FULL_DISK_S", 0.0)
    for number in range(3):
        _, core = generate(tmp_path, [[number, *PROMPT[1:]]])
    assert dropped(core)["write_failed"] <= 26 // 3
    assert dropped(core)["budget"] > 0
    assert len(shards(tmp_path)) <= 30
    (warm,), _ = generate(tmp_path, [[2, *PROMPT[1:]]])
    assert warm.cached_tokens > 0
