from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from fakes import small_config
from octavo.engine.api.errors import InvalidRequest, NotConfigured, NotFound
from octavo.engine.api.outputs import Delta
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.cli import main
from octavo.engine.client.cache_client import prefix_of
from octavo.engine.core import snapshots
from octavo.engine.kv_store import page_files
from octavo.engine.kv_store.page_runs import PageRun
from served import Served, collect, eventually, served

pytestmark = pytest.mark.server

SHORT = SamplingParams(max_tokens=2, ignore_eos=True)
PROMPT = list(range(10, 32))  # five pages of 4 tokens, and two more tokens


async def say(its: Served, ids: list[int], *, salt: str = "") -> Delta:
    return (await collect(its.client.generate(ids, SHORT, salt=salt)))[0]


async def test_one_prompt_moves_to_another_server(tmp_path: Path) -> None:
    config = small_config(save_dir=tmp_path)
    async with served(config=config) as its:
        first = await say(its, PROMPT, salt="s")
        with pytest.raises(NotFound, match="none of these 22 tokens is cached"):
            await its.client.cache.save("a/x.safetensors", prefix_of(token_ids=PROMPT))
        saved = await its.client.cache.save("a/x.safetensors", prefix_of(token_ids=PROMPT, cache_salt="s"))
        assert (saved.num_pages, saved.num_tokens) == (5, 20)
        assert saved.num_bytes == (tmp_path / "a" / "x.safetensors").stat().st_size
    async with served(config=config) as its:
        loaded = await its.client.cache.load("a/x.safetensors")
        assert (loaded.num_pages, loaded.num_tokens, loaded.converted) == (5, 20, "")
        assert (await say(its, PROMPT)).cached_tokens == 0, "another salt"
        again = await say(its, PROMPT, salt="s")
        assert (again.cached_tokens, again.token_ids) == (20, first.token_ids)
        known = await its.client.cache.load("a/x.safetensors")
        assert (known.num_pages, known.num_known_pages) == (0, 5)


async def test_saves_come_one_after_the_other_and_take_no_thread_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, threads = threading.Event(), list[str]()
    write = page_files.write_run

    def slow(path: Path, run: PageRun) -> None:
        threads.append(threading.current_thread().name)
        assert held.wait(20)
        write(path, run)

    monkeypatch.setattr(snapshots, "write_run", slow)
    async with served(config=small_config(save_dir=tmp_path)) as its:
        await say(its, PROMPT)
        what = prefix_of(token_ids=PROMPT)
        saves = [asyncio.ensure_future(its.client.cache.save("x.safetensors", what)) for _ in range(12)]
        await eventually(lambda: bool(threads), "the first is being written")
        assert len((await say(its, PROMPT)).token_ids) == 2
        assert (await its.client.cache.stats()).page_size == 4, "which needs a thread, too"
        held.set()
        results = await asyncio.gather(*saves, return_exceptions=True)
    refused = [result for result in results if isinstance(result, InvalidRequest)]
    assert (len(refused), len(results) - len(refused)) == (11, 1)
    assert threads == ["octavo-snapshots"]


async def test_refused_loads_change_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    async with served(config=small_config(save_dir=folder)) as its:
        await say(its, PROMPT)
        for path in ("../x", "/tmp/x", "", "link/x", "a/../../x", "x\n", "a\x1b/x"):
            for call in (its.client.cache.save, its.client.cache.load):
                with pytest.raises(InvalidRequest, match="path"):
                    await call(path)
        with pytest.raises(NotFound, match="no saved pages"):
            await its.client.cache.load("none")
        await its.client.cache.save("x.safetensors", prefix_of(token_ids=PROMPT))
        with pytest.raises(InvalidRequest, match="there already"):
            await its.client.cache.save("x.safetensors", prefix_of(token_ids=PROMPT))
        raw = (folder / "x.safetensors").read_bytes()
        (folder / "bad.safetensors").write_bytes(raw[:-1])
        await its.client.cache.flush()
        with pytest.raises(InvalidRequest, match="nothing was loaded"):
            await its.client.cache.load("bad.safetensors")
        assert (await say(its, PROMPT)).cached_tokens == 0
    assert sorted(path.name for path in folder.iterdir()) == ["bad.safetensors", "link", "x.safetensors"]
    async with served() as its:
        with pytest.raises(NotConfigured, match="--save-dir"):
            await its.client.cache.save("x")
        with pytest.raises(NotConfigured, match="--save-dir"):
            await its.client.cache.load("x")


async def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(save_dir=tmp_path)

    async def command(its: Served, *words: str) -> dict[str, object]:
        assert await asyncio.to_thread(main, ["cache", *words, "--connect", its.address, "--json"]) == 0
        result: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return result

    async with served(config=config) as its:
        for prompt in (PROMPT, [*PROMPT[:8], *range(40, 60)]):
            await say(its, prompt)
        saved = await command(its, "save", "whole")
    async with served(config=config) as its:
        loaded = await command(its, "load", "whole")
        assert loaded["num_pages"] == saved["num_pages"]
        assert (await say(its, PROMPT)).cached_tokens == 20
