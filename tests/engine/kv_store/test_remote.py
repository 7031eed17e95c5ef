from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from fakes import FakeCore, shard_store, small_config
from octavo.block_manager import Digest
from octavo.engine import LLM, EngineConfig, SamplingParams
from octavo.engine.api.config import EngineConfig as Config
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.api.outputs import RequestOutput
from octavo.engine.api.store_counters import StoreCounts
from octavo.engine.cli.serve import _tenant_salts
from octavo.engine.core import commands
from octavo.engine.frontend.async_engine import AsyncEngine
from octavo.engine.kv_store import reader, redis_store
from octavo.engine.kv_store.page_runs import PageRun
from octavo.engine.kv_store.redis_store import RedisStore
from octavo.engine.kv_store.remote import RemoteShards
from octavo.kernels.page_bytes import PageBytes
from page_stores import MooncakeMaster, RedisServer, StoreServer

PROMPT = [number % 250 for number in range(101)]
FOUR_TOKENS = SamplingParams(max_tokens=4, ignore_eos=True)


def until(check: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not check():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(params=[RedisServer, MooncakeMaster], ids=lambda kind: kind.scheme)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreServer]:
    server = request.param(tmp_path)
    try:
        server.start()
        server.wait()
        yield server
    finally:
        server.close()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    try:
        server.start()
        server.wait()
        yield server
    finally:
        server.close()


def shards_of(core: FakeCore) -> RemoteShards:
    assert core.core is not None
    shards = shard_store(core.core).folder
    assert isinstance(shards, RemoteShards)
    return shards


def keys(core: FakeCore, tokens: list[int] = PROMPT) -> list[str]:
    assert core.core is not None
    kind = shards_of(core)._keys[0]
    return [f"octavo:{kind}:{digest.hex()}" for digest in core.core._blocks.page_digests(tokens, [])]


def stored(server: StoreServer, names: list[str]) -> list[str]:
    return [name for name in names if server.get(name) is not None]


def generate(config: Config, core: FakeCore | None = None) -> tuple[RequestOutput, StoreCounts]:
    core = core or FakeCore()
    with LLM(config, core_factory=core) as llm:
        (output,) = llm.generate([PROMPT], FOUR_TOKENS, progress=False)
        assert core.core is not None
    counts = core.core._gauge_source.measure().store
    assert counts is not None
    core.core._blocks.check()
    return output, counts


def test_a_second_machine_continues_from_the_pages_of_the_first(server: StoreServer) -> None:
    config, core = small_config(remote_cache=server.url), FakeCore()
    cold, wrote = generate(config, core)
    answer = list(cold.outputs[0].token_ids)
    assert (cold.cached_tokens, wrote.written) == (0, 26)
    assert len(stored(server, keys(core, PROMPT + answer))) == 26
    warm, read = generate(config)
    assert (warm.cached_tokens, read.hits, read.loaded) == (100, 1, 25)
    assert read.written == (server.scheme == "mooncake"), "only Redis lists the page of the answer"
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_an_unknown_prompt_does_not_wait_for_the_pages_of_another(redis_server: RedisServer) -> None:
    config, unknown = small_config(remote_cache=redis_server.url), [number % 251 for number in range(7, 108)]
    generate(config)
    core, calls = FakeCore(), list[str]()
    with LLM(config, core_factory=core) as llm:
        shards = shards_of(core)
        get, ask = shards.get, shards.ask

        def slow(digest: Digest, **options: Any) -> PageBytes:
            calls.append("get")
            time.sleep(0.02)
            return get(digest, **options)

        def counted(digests: Sequence[Digest]) -> None:
            if digests:
                calls.append("ask")
            ask(digests)

        shards.get, shards.ask = slow, counted  # type: ignore[method-assign]
        outputs = llm.generate([PROMPT, unknown], FOUR_TOKENS, progress=False)
    assert [output.cached_tokens for output in outputs] == [100, 0]
    assert calls.count("get") == 25
    assert calls.index("ask") < 15, calls


def test_pages_listed_before_a_timeout_are_found_after_it(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(small_config(remote_cache=redis_server.url))
    store = RedisStore(redis_server.url)
    (kind,) = {key.split(b":")[1].decode() for key in redis_server.client.keys("octavo:*:written")}
    monkeypatch.setattr(redis_store, "READ_AT_ONCE", 10)
    read, calls = store._client.xread, itertools.count()

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 1:
            raise redis.TimeoutError
        return read(*arguments, **options)

    monkeypatch.setattr(store._client, "xread", failing)
    with pytest.raises(OSError):
        store.find(kind, ())
    assert len(store.find(kind, ())) == 26
    store.close()


def test_pages_in_redis_expire(redis_server: RedisServer) -> None:
    core = FakeCore()
    generate(small_config(remote_cache=redis_server.url), core)
    assert all(0 < int(redis_server.client.ttl(key)) <= 7 * 24 * 3600 for key in keys(core))


def test_a_running_machine_finds_new_pages_at_once(server: StoreServer) -> None:
    config, core = small_config(remote_cache=server.url), FakeCore()
    with LLM(config, core_factory=core) as llm:
        shards_of(core).refresh_s = 1000.0
        generate(config)
        (warm,) = llm.generate([PROMPT], FOUR_TOKENS, progress=False)
    assert warm.cached_tokens == 100


def test_a_running_machine_learns_of_new_pages(redis_server: RedisServer) -> None:
    config, core = small_config(remote_cache=redis_server.url), FakeCore()
    with LLM(config, core_factory=core):
        assert core.core is not None
        generate(config)
        digests = core.core._blocks.page_digests(PROMPT, [])
        until(lambda: shards_of(core).has(digests[24]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:-1], "torn"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "altered"),
        (lambda data: data.replace(b"pages 3", b"pages 2"), "foreign"),
        (lambda _: b"x", "torn"),
    ],
)
def test_an_invalid_page_is_deleted_and_computed(
    server: StoreServer, change: Callable[[bytes], bytes], reason: str
) -> None:
    config = small_config(remote_cache=server.url)
    core = FakeCore()
    cold, _ = generate(config, core)
    bad = keys(core)[10]
    data = server.get(bad)
    assert data is not None
    server.set(bad, change(data))
    warm, counts = generate(config)
    assert (warm.cached_tokens, counts.loaded, dict(counts.dropped)) == (40, 10, {reason: 1})
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert generate(config)[0].cached_tokens == 100


def test_a_page_under_another_name_is_not_served(server: StoreServer) -> None:
    config = small_config(remote_cache=server.url)
    core = FakeCore()
    generate(config, core)
    first, second, *_ = keys(core)
    data = server.get(first)
    assert data is not None
    server.set(second, data)
    warm, counts = generate(config)
    assert (warm.cached_tokens, dict(counts.dropped)) == (4, {"altered": 1})


def test_evicted_pages_are_computed(server: StoreServer) -> None:
    config, core = small_config(remote_cache=server.url), FakeCore()
    cold, _ = generate(config, core)
    server.delete(keys(core))
    again, counts = generate(config)
    assert (again.cached_tokens, dict(counts.dropped)) == (0, {})
    assert len(stored(server, keys(core))) == 25
    assert again.outputs[0].token_ids == cold.outputs[0].token_ids


def test_pages_that_wait_to_be_written_are_counted(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, gate = FakeCore(), threading.Event()
    with LLM(small_config(remote_cache=redis_server.url), core_factory=core) as llm:
        put = RemoteShards.put

        def late(shards: RemoteShards, digest: Digest, run: PageRun, group: int = 0) -> int:
            gate.wait(60)
            return put(shards, digest, run, group)

        monkeypatch.setattr(RemoteShards, "put", late)
        llm.generate([PROMPT], FOUR_TOKENS, progress=False)
        assert llm._run_command(commands.count_unwritten_pages(PROMPT)) == 25
        assert llm._run_command(commands.count_unwritten_pages(PROMPT, b"salt")) == 0
        gate.set()
        until(lambda: llm._run_command(commands.count_unwritten_pages(PROMPT)) == 0)
        assert len(stored(redis_server, keys(core))) == 25


def test_a_dead_server_costs_only_the_cache(server: StoreServer, caplog: pytest.LogCaptureFixture) -> None:
    config = small_config(remote_cache=server.url)
    cold, _ = generate(config)
    core = FakeCore()
    with LLM(config, core_factory=core) as llm:
        server.stop()
        (dead,) = llm.generate([PROMPT], FOUR_TOKENS, progress=False)
        (other,) = llm.generate([PROMPT[50:]], FOUR_TOKENS, progress=False)
        assert core.core is not None
        until(lambda: shards_of(core).is_down)
        server.start()
        server.wait()
        until(lambda: not shards_of(core).is_down)
        llm.generate([PROMPT[60:]], FOUR_TOKENS, progress=False)
        core.core._blocks.check()
    assert dead.outputs[0].token_ids == cold.outputs[0].token_ids
    assert dead.cached_tokens == other.cached_tokens == 0
    assert sum("computed until it does" in record.message for record in caplog.records) == 1
    assert len(stored(server, keys(core, PROMPT[60:]))) == 10, "the last prompt's pages are written again"


def test_a_server_that_hangs_delays_a_prompt_by_one_timeout(server: StoreServer) -> None:
    config = small_config(remote_cache=server.url)
    cold, _ = generate(config)
    with LLM(config, core_factory=FakeCore()) as llm:
        server.pause()
        began = time.monotonic()
        (late,) = llm.generate([PROMPT], FOUR_TOKENS, progress=False)
        seconds = time.monotonic() - began
        server.resume()
    assert late.cached_tokens == 0
    assert late.outputs[0].token_ids == cold.outputs[0].token_ids
    assert seconds < 10


def test_pages_that_come_too_slowly_are_computed(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, calls = small_config(remote_cache=server.url), dict[str, set[str]]()
    cold, _ = generate(config)
    monkeypatch.setattr(reader, "WAIT_S", 0.3)
    core = FakeCore()
    with LLM(config, core_factory=core) as llm:
        store = shards_of(core)._store

        def slow(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
            calls.setdefault(name, set()).add(threading.current_thread().name)
            time.sleep(0.2)
            return call(*arguments)

        for name in ("get", "put", "delete", "touch", "find", "used_bytes"):
            setattr(store, name, functools.partial(slow, name, getattr(store, name)))
        late, other = llm.generate([PROMPT, PROMPT[50:]], FOUR_TOKENS, progress=False)
        assert core.core is not None
        counts = core.core._gauge_source.measure().store
    assert late.cached_tokens < 100
    assert late.outputs[0].token_ids == cold.outputs[0].token_ids
    assert other.cached_tokens == 0
    assert counts is not None
    assert counts.dropped["read_slow"] >= 1
    assert {"get", "find"} <= calls.keys()
    threads = {f"octavo-store-{name}" for name in ("reader", "writer", "index")}
    assert set.union(*calls.values()) <= threads, "the engine's thread must not wait"


def test_a_tenant_does_not_find_the_pages_of_another(server: StoreServer) -> None:
    config = small_config(remote_cache=server.url)

    async def asked(tenant: str) -> tuple[int, StoreCounts]:
        core = FakeCore()
        engine = AsyncEngine(config, core_factory=core)
        await engine.start()
        try:
            salt = _tenant_salts(config).of(tenant)
            deltas = [delta async for delta in engine.generate(PROMPT, FOUR_TOKENS, salt=salt)]
        finally:
            await engine.stop()
        assert core.core is not None
        counts = core.core._gauge_source.measure().store
        assert counts is not None
        return deltas[-1].cached_tokens, counts

    _, wrote = asyncio.run(asked("a"))
    assert wrote.written == 26
    cached, counts = asyncio.run(asked("b"))
    assert (cached, counts.hits, counts.misses, counts.loaded) == (0, 0, 1, 0)
    cached, counts = asyncio.run(asked("a"))
    assert (cached, counts.hits, counts.misses, counts.loaded) == (100, 1, 0, 25)


def test_tenants_have_one_key_on_all_machines(server: StoreServer) -> None:
    config = EngineConfig(remote_cache=server.url)
    salts = {_tenant_salts(config).of("a") for _ in range(3)}
    assert len(salts) == 1
    assert salts != {_tenant_salts(config).of("b")}


def test_without_a_secret_tenants_of_mooncake_have_a_key_per_server() -> None:
    config = EngineConfig(remote_cache="mooncake://127.0.0.1:1")
    assert _tenant_salts(config).of("a") != _tenant_salts(config).of("a")


def test_a_wrong_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="remote_cache must be redis://"):
        LLM(small_config(remote_cache="ftp://x"), core_factory=FakeCore())
    with pytest.raises(InvalidConfig, match="must be a store that responds"):
        LLM(small_config(remote_cache="redis://127.0.0.1:1"), core_factory=FakeCore())
    with pytest.raises(InvalidConfig) as caught:
        LLM(small_config(remote_cache="redis://user:secret@127.0.0.1:1"), core_factory=FakeCore())
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidConfig, match="must be mooncake://") as caught:
        LLM(small_config(remote_cache="mooncake://:secret@127.0.0.1:1?x=1"), core_factory=FakeCore())
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidConfig, match="left out with cache_dir"):
        EngineConfig(remote_cache="redis://127.0.0.1:1", cache_dir=tmp_path)


def test_a_mooncake_master_that_does_not_respond_is_refused() -> None:
    pytest.importorskip("mooncake", reason="pip install '.[mooncake]'")
    with pytest.raises(InvalidConfig, match="must be a Mooncake master that responds"):
        LLM(small_config(remote_cache="mooncake://127.0.0.1:1"), core_factory=FakeCore())


@pytest.mark.parity
def test_pages_of_a_real_model_keep_their_bits(server: StoreServer) -> None:
    config = EngineConfig(
        num_pages=64, page_size=16, max_running=4, max_step_tokens=128, kv_format="fp4",
        remote_cache=server.url,
    )  # fmt: skip
    outputs = []
    for _ in range(2):
        with LLM(config) as llm:
            outputs += llm.generate([PROMPT * 3], FOUR_TOKENS, progress=False)
    cold, warm = outputs
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 288)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
