from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes import FakeCore, shard_folder, small_config
from octavo.block_manager import Digest
from octavo.engine import LLM, AsyncEngine, SamplingParams
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.api.outputs import RequestOutput
from octavo.engine.api.store_counters import StoreCounts
from octavo.engine.kv_store import shard_store as shard_store_module
from octavo.engine.kv_store.folder import ShardFolder
from octavo.engine.kv_store.page_runs import PageRun

PAGE_SIZE = 4
PROMPT = [number % 250 for number in range(101)]
FOUR_TOKENS = SamplingParams(max_tokens=4, ignore_eos=True)


def generate(
    config: EngineConfig, prompts: list[list[int]], *, core: FakeCore | None = None
) -> tuple[list[RequestOutput], StoreCounts]:
    core = core or FakeCore()
    with LLM(config, core_factory=core) as llm:
        outputs = llm.generate(prompts, FOUR_TOKENS, progress=False)
        assert core.core is not None
    counts = core.core._gauge_source.measure().store
    assert counts is not None
    core.core._blocks.check()
    return outputs, counts


def shards(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def test_a_prompt_is_found_after_a_restart(tmp_path: Path) -> None:
    config = small_config(cache_dir=tmp_path)
    (cold,), wrote = generate(config, [PROMPT])
    assert (cold.cached_tokens, wrote.written, wrote.misses) == (0, 26, 1)  # 101 + 3 positions
    assert len(shards(tmp_path)) == 26
    (warm,), read = generate(config, [PROMPT])
    assert warm.cached_tokens == 100
    assert (read.hits, read.misses, read.loaded, read.written, dict(read.dropped)) == (1, 0, 25, 0, {})
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert read.num_bytes == sum(path.stat().st_size for path in shards(tmp_path))


@pytest.mark.parametrize("salts", [(b"a", b"b"), (b"", b"x")])
def test_tenants_do_not_share_pages_on_disk(tmp_path: Path, salts: tuple[bytes, bytes]) -> None:
    async def cached(salt: bytes) -> int:
        engine = AsyncEngine(small_config(cache_dir=tmp_path), core_factory=FakeCore())
        await engine.start()
        try:
            deltas = [delta async for delta in engine.generate(PROMPT, FOUR_TOKENS, salt=salt)]
        finally:
            await engine.stop()
        return deltas[-1].cached_tokens

    assert [asyncio.run(cached(salt)) for salt in (*salts, salts[1])] == [0, 0, 100]


def test_a_shard_that_was_altered_is_dropped_and_computed(tmp_path: Path) -> None:
    config = small_config(cache_dir=tmp_path)
    (cold,), _ = generate(config, [PROMPT])
    core = FakeCore()
    folder = None
    with LLM(config, core_factory=core):
        assert core.core is not None
        folder = shard_folder(core.core)
    digests = core.core._blocks.page_digests(PROMPT, [])
    bad = folder.path(digests[10])
    raw = bytearray(bad.read_bytes())
    raw[-1] ^= 1
    bad.write_bytes(raw)
    (warm,), counts = generate(config, [PROMPT])
    assert (warm.cached_tokens, counts.loaded, dict(counts.dropped)) == (40, 10, {"altered": 1})
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert counts.written == 15, "what was computed in its place, and behind it, is written again"
    (again,), counts = generate(config, [PROMPT])
    assert (again.cached_tokens, dict(counts.dropped)) == (100, {})


def test_a_prompt_that_needs_the_pool_twice_is_served(tmp_path: Path) -> None:
    config = small_config(cache_dir=tmp_path, num_pages=64)
    prompts = [[number, *PROMPT] for number in range(20)] * 2
    cold, _ = generate(small_config(cache_dir=tmp_path / "none", num_pages=64), prompts)
    generate(config, prompts[:20])
    warm, counts = generate(config, prompts)
    assert [o.outputs[0].token_ids for o in warm] == [o.outputs[0].token_ids for o in cold]
    assert counts.loaded > 100


class Slow:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.reading = threading.Event()
        get: Callable[..., object] = ShardFolder.get

        def held(*args: object, **options: object) -> object:
            self.reading.set()
            assert self.go.wait(20)
            return get(*args, **options)

        monkeypatch.setattr(ShardFolder, "get", held)


async def test_waiting_for_the_disk_delays_no_request_and_is_abortable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(cache_dir=tmp_path)
    generate(config, [PROMPT])
    slow, core = Slow(monkeypatch), FakeCore()
    engine = AsyncEngine(config, core_factory=core)
    await engine.start()
    try:
        waiting = asyncio.create_task(anext(engine.generate(PROMPT, FOUR_TOKENS, request_id="waits")))
        assert await asyncio.to_thread(slow.reading.wait, 20)
        others = [delta async for delta in engine.generate([1, 2, 3], FOUR_TOKENS)]
        assert others[-1].finish_reason is not None
        assert engine.gauges().num_waiting == 1
        assert not waiting.done()
        await engine.abort("waits")
        delta = await waiting
        assert delta.finish_reason is not None
        slow.go.set()
        (*_, last) = [delta async for delta in engine.generate(PROMPT, FOUR_TOKENS)]
        assert last.cached_tokens == 100
        assert engine.gauges().num_waiting == engine.gauges().pages_held == 0
    finally:
        slow.go.set()
        await engine.stop()


async def test_an_idle_engine_wakes_when_pages_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(cache_dir=tmp_path)
    generate(config, [PROMPT])
    slow, core = Slow(monkeypatch), FakeCore()
    engine = AsyncEngine(config, core_factory=core)
    await engine.start()
    try:
        waiting = asyncio.create_task(anext(engine.generate(PROMPT, FOUR_TOKENS)))
        assert await asyncio.to_thread(slow.reading.wait, 20)
        await asyncio.sleep(0.1)
        assert core.runner is not None
        assert core.runner.num_steps == 0, "the engine's thread must sleep"
        slow.go.set()
        assert (await waiting).cached_tokens == 100
    finally:
        slow.go.set()
        await engine.stop()


def test_a_disk_that_is_too_slow_costs_pages_and_not_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, put = threading.Event(), ShardFolder.put

    def held(self: ShardFolder, digest: Digest, run: PageRun, group: int) -> int:
        assert go.wait(20)
        return put(self, digest, run, group)

    monkeypatch.setattr(ShardFolder, "put", held)
    monkeypatch.setattr(shard_store_module, "QUEUE_BYTES", 5 * PAGE_SIZE * 16)
    core = FakeCore()
    with LLM(small_config(cache_dir=tmp_path), core_factory=core) as llm:
        llm.generate([PROMPT], FOUR_TOKENS, progress=False)
        go.set()
    assert core.core is not None
    counts = core.core._gauge_source.measure().store
    assert counts is not None
    assert (counts.written, dict(counts.dropped)) == (5, {"queue_full": 21})


def test_a_failing_disk_stops_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardFolder, "put", full)
    (output,), counts = generate(small_config(cache_dir=tmp_path), [PROMPT])
    assert len(output.outputs[0].token_ids) == 4
    assert (counts.written, dict(counts.dropped)) == (0, {"write_failed": 26})
    assert sum("No space left" in message for message in caplog.messages) == 1, "said once, not per page"


def test_the_budget_holds(tmp_path: Path) -> None:
    config = small_config(cache_dir=tmp_path)
    generate(config, [PROMPT])
    size = shards(tmp_path)[0].stat().st_size
    budget = size * 30
    for number in range(4):
        _, counts = generate(small_config(cache_dir=tmp_path, cache_dir_bytes=budget), [[number, *PROMPT]])
        assert sum(path.stat().st_size for path in shards(tmp_path)) <= budget
    assert counts.dropped["budget"] > 0


def test_two_servers_share_one_folder(tmp_path: Path) -> None:
    config = small_config(cache_dir=tmp_path, cache_dir_bytes=60_000)
    prompts = [[[who, *PROMPT[: 60 + n]] if n % 2 else [n, *PROMPT] for n in range(8)] for who in (1, 2)]
    want, _ = generate(small_config(cache_dir=tmp_path / "alone"), [p for half in prompts for p in half])
    cores = [FakeCore(), FakeCore()]
    llms = [LLM(config, core_factory=core) for core in cores]
    try:
        for _ in range(3):
            results: list[list[RequestOutput]] = [[], []]

            def serve(who: int, results: list[list[RequestOutput]] = results) -> None:
                results[who] = llms[who].generate(prompts[who], FOUR_TOKENS, progress=False)

            threads = [threading.Thread(target=serve, args=(who,)) for who in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            got = [output.outputs[0].token_ids for half in results for output in half]
            assert got == [output.outputs[0].token_ids for output in want]
            for core in cores:
                assert core.core is not None
                core.core._blocks.flush()
    finally:
        for llm in llms:
            llm.close()
    dropped = [core.core._gauge_source.measure().store.dropped for core in cores if core.core]  # type: ignore[union-attr]
    assert all(set(reasons) <= {"budget"} for reasons in dropped), dropped


def test_unusable_cache_folders_are_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InvalidConfig, match="left out without prefix_cache"):
        EngineConfig(cache_dir=tmp_path, prefix_cache=False)
    with pytest.raises(InvalidConfig, match="cache_dir_bytes must be at least 1"):
        EngineConfig(cache_dir=tmp_path, cache_dir_bytes=0)
    with pytest.raises(InvalidConfig, match=r"file.* cannot be used"):
        LLM(small_config(cache_dir=tmp_path / "file"), core_factory=FakeCore())
    with pytest.raises(InvalidConfig, match=r"save_dir .*file cannot be used: .*; give a folder"):
        LLM(small_config(save_dir=tmp_path / "file"), core_factory=FakeCore())
