from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeCore, shard_folder, small_config
from octavo.block_manager import FullAttention, KVGroupSpec, SlidingWindow
from octavo.engine import LLM, SamplingParams
from octavo.engine.api.outputs import RequestOutput
from octavo.engine.api.store_counters import StoreCounts
from octavo.engine.core import snapshots as saved
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.core.snapshots import LoadedPages, load, save_all
from octavo.engine.kv_store.page_files import read_run
from oracle import alone

PROMPT = [number % 250 for number in range(101)]
FOUR_TOKENS = SamplingParams(max_tokens=4, ignore_eos=True)
FULL = FullAttention(num_pages=64)
MIXED = (FULL, SlidingWindow(num_pages=40, window=10), SlidingWindow(num_pages=40, window=6, keep=5))
WINDOW_ONLY = (SlidingWindow(num_pages=64, window=10, keep=3),)


def core_of(fake: FakeCore) -> EngineCore:
    assert fake.core is not None
    return fake.core


def generate(
    folder: Path, groups: tuple[KVGroupSpec, ...], prompts: list[list[int]]
) -> tuple[list[RequestOutput], StoreCounts, EngineCore]:
    fake = FakeCore(groups=groups)
    with LLM(small_config(cache_dir=folder), core_factory=fake) as llm:
        outputs = llm.generate(prompts, FOUR_TOKENS, progress=False)
    core = core_of(fake)
    core._blocks.check()
    counts = core._gauge_source.measure().store
    assert counts is not None
    return outputs, counts, core


def shard(core: EngineCore, index: int, group: int) -> Path:
    return shard_folder(core).path(core._blocks.page_digests(PROMPT, [])[index], group)


@pytest.mark.parametrize(
    ("groups", "written", "loaded"),
    [(MIXED, 3 * 26, 25 + 3 + 4), (WINDOW_ONLY, 26, 1 + 3)],
    ids=["mixed", "only windows"],
)
def test_only_visible_pages_are_loaded(
    groups: tuple[KVGroupSpec, ...], written: int, loaded: int, tmp_path: Path
) -> None:
    (cold,), wrote, _ = generate(tmp_path, groups, [PROMPT])
    assert (cold.cached_tokens, wrote.written, wrote.misses) == (0, written, 1)
    (warm,), read, _ = generate(tmp_path, groups, [PROMPT])
    assert (warm.cached_tokens, read.hits, read.loaded, read.written) == (100, 1, loaded, 0)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_invisible_pages_need_not_be_cached(tmp_path: Path) -> None:
    (cold,), _, core = generate(tmp_path, MIXED, [PROMPT])
    for index in range(22):
        shard(core, index, 1).unlink()
    for index in range(2, 23):
        shard(core, index, 2).unlink()
    (warm,), counts, _ = generate(tmp_path, MIXED, [PROMPT])
    assert (warm.cached_tokens, counts.loaded) == (100, 32)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


@pytest.mark.parametrize(
    ("group", "index", "cached"),
    [(0, 10, 40), (1, 23, 92), (2, 24, 96), (2, 1, 4), (1, 21, 100)],
    ids=["full", "window", "last", "kept", "not seen"],
)
def test_without_one_page_a_shorter_prefix_is_found(
    group: int, index: int, cached: int, tmp_path: Path
) -> None:
    (cold,), _, core = generate(tmp_path, MIXED, [PROMPT])
    path = shard(core, index, group)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    (warm,), counts, _ = generate(tmp_path, MIXED, [PROMPT])
    assert warm.cached_tokens == cached
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert dict(counts.dropped) == ({} if cached == 100 else {"altered": 1})


def test_groups_do_not_take_one_another_s_pages(tmp_path: Path) -> None:
    (cold,), _, core = generate(tmp_path, MIXED, [PROMPT])
    shard(core, 24, 1).write_bytes(shard(core, 24, 0).read_bytes())
    (warm,), counts, _ = generate(tmp_path, MIXED, [PROMPT])
    assert (warm.cached_tokens, dict(counts.dropped)) == (96, {"foreign": 1})
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_the_other_group_s_shard_is_no_other_format(tmp_path: Path) -> None:
    _, _, core = generate(tmp_path, MIXED, [PROMPT])
    folder, digest = shard_folder(core), core._blocks.page_digests(PROMPT, [])[0]
    assert not folder.has_of_other_kind(digest)
    with LLM(small_config(cache_dir=tmp_path), core_factory=FakeCore(groups=WINDOW_ONLY)):
        pass
    shard(core, 0, 1).unlink()
    other = FakeCore(groups=(FULL, SlidingWindow(num_pages=40, window=11)))
    with LLM(small_config(cache_dir=tmp_path), core_factory=other):
        assert shard_folder(core_of(other)).has_of_other_kind(digest)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.slow
def test_restarts_and_losses_never_change_outputs(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    windows = st.builds(
        SlidingWindow, num_pages=st.integers(20, 40), window=st.integers(2, 24), keep=st.integers(0, 9)
    )
    groups: tuple[KVGroupSpec, ...] = tuple(data.draw(st.lists(windows, min_size=1, max_size=2)))
    if data.draw(st.booleans()):
        groups = (FullAttention(num_pages=data.draw(st.integers(28, 48))), *groups)
    rng = random.Random(data.draw(st.integers(0, 99)))
    for _ in range(3):
        prompts = [PROMPT[: rng.randrange(1, 90)] + [rng.randrange(3)] * rng.randrange(9) for _ in range(4)]
        outputs, counts, _ = generate(folder, groups, prompts)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == alone(prompt, FOUR_TOKENS).token_ids
        assert set(counts.dropped) == set()
        for path in sorted(folder.rglob("*.safetensors")):
            if rng.random() < 0.1:
                path.unlink()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    engines: list[LLM] = []

    def make(groups: tuple[KVGroupSpec, ...] = MIXED) -> LLM:
        engines.append(LLM(small_config(save_dir=tmp_path), core_factory=FakeCore(groups=groups)))
        return engines[-1]

    yield make
    for llm in engines:
        llm.close()


def ask_one(llm: LLM, prompt: list[int]) -> RequestOutput:
    (output,) = llm.generate([prompt], FOUR_TOKENS, progress=False)
    return output


@pytest.mark.parametrize("groups", [MIXED, WINDOW_ONLY], ids=["mixed", "only windows"])
def test_a_saved_prompt_has_the_visible_pages(
    groups: tuple[KVGroupSpec, ...],
    engine: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saved, "PART_BYTES", 3 * 4 * 16 * len(groups))  # bytes of three pages
    path = tmp_path / "x.safetensors"
    first = engine(groups)
    assert first.save_prompt(PROMPT, path).num_pages == 25
    indices = [(0, 22, 23, 24)] if groups == WINDOW_ONLY else [(*range(25),), (22, 23, 24), (0, 1, 23, 24)]
    assert [part.indices for part in read_run(path).parts] == indices
    second = engine(groups)
    num = len(indices[0])
    assert second.load_prompt(path) == LoadedPages(num, 4 * num, 0, 0)
    assert second.load_prompt(path) == LoadedPages(0, 0, num, 0)
    output = ask_one(second, PROMPT)
    assert output.cached_tokens == 100
    assert output.outputs[0].token_ids == ask_one(first, PROMPT).outputs[0].token_ids


@pytest.mark.parametrize("groups", [MIXED, WINDOW_ONLY], ids=["mixed", "only windows"])
def test_a_saved_cache_with_windows_loads_completely(
    groups: tuple[KVGroupSpec, ...],
    engine: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saved, "PART_BYTES", 5 * 4 * 16 * len(groups))
    prompts = [PROMPT[:41], [*PROMPT[:20], *range(30, 50)], [7] * 30]
    first = engine(groups)
    want = [ask_one(first, prompt) for prompt in prompts]
    done = save_all(first._run_command, tmp_path / "cache")
    second = engine(groups)
    loaded = load(second._run_command, tmp_path / "cache")
    assert loaded == LoadedPages(done.num_pages, done.num_tokens, 0, 0)
    for prompt, output in zip(prompts, want, strict=True):
        found = ask_one(second, prompt)
        assert found.cached_tokens == (len(prompt) - 1) // 4 * 4
        assert found.outputs[0].token_ids == output.outputs[0].token_ids
