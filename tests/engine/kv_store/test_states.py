from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeCore, shard_folder, small_config
from octavo.block_manager import (
    BlockManager,
    Digest,
    FullAttention,
    KVGroupSpec,
    RecurrentState,
    SlidingWindow,
)
from octavo.block_manager.digests import root
from octavo.engine import LLM, SamplingParams
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.outputs import RequestOutput
from octavo.engine.api.store_counters import StoreCounts
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.core.snapshots import load, save_all
from octavo.engine.kv_store.page_files import read_run, write_run
from octavo.engine.kv_store.page_runs import PageLayoutKey, PagePart, PageRun, StateKind, segments
from octavo.engine.kv_store.remote import RemoteShards
from octavo.engine.kv_store.shard_store import ShardStore
from octavo.kernels.interface import PoolSpec
from oracle import alone
from swapping import prefetch_job

PROMPT = [number % 250 for number in range(101)]
PARAMS = SamplingParams(max_tokens=14, ignore_eos=True)
GROUPS = (FullAttention(num_pages=64),)
MIXED = (*GROUPS, SlidingWindow(num_pages=48, window=10))
TAILS = RecurrentState(num_slots=16, slot_bytes=16)
DENSE = RecurrentState(num_slots=64, slot_bytes=16, every_page=True)


def core_of(fake: FakeCore) -> EngineCore:
    assert fake.core is not None
    return fake.core


def generate(
    folder: Path,
    prompts: list[list[int]],
    *,
    groups: tuple[KVGroupSpec, ...] = GROUPS,
    states: RecurrentState = TAILS,
) -> tuple[list[RequestOutput], StoreCounts, EngineCore]:
    fake = FakeCore(groups=groups, states=states)
    with LLM(small_config(cache_dir=folder), core_factory=fake) as llm:
        outputs = llm.generate(prompts, PARAMS, progress=False)
    core = core_of(fake)
    core._blocks.check()
    counts = core._gauge_source.measure().store
    assert counts is not None
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == alone(prompt, PARAMS).token_ids
    return outputs, counts, core


def snapshots(core: EngineCore, groups: int = 1) -> list[Path]:
    return sorted(shard_folder(core)._folders[groups].rglob("*.safetensors"))


@pytest.mark.parametrize("groups", [GROUPS, MIXED], ids=["full", "windows"])
def test_prompts_and_ends_are_kept_and_nothing_between(
    groups: tuple[KVGroupSpec, ...], tmp_path: Path
) -> None:
    (cold,), wrote, core = generate(tmp_path, [PROMPT], groups=groups)
    assert cold.cached_tokens == 0
    files = snapshots(core, len(groups))
    assert len(files) == 2, "after the prompt, and after the last page of what was said"
    assert wrote.written == 28 * len(groups) + 2
    digests = core._blocks.page_digests([*PROMPT, *cold.outputs[0].token_ids], [])
    assert {path.stem for path in files} == {digests[24].hex(), digests[27].hex()}
    turn = [*PROMPT, *cold.outputs[0].token_ids, 1, 2, 3]
    (warm, longer), read, _ = generate(tmp_path, [PROMPT, turn], groups=groups)
    assert (warm.cached_tokens, longer.cached_tokens, read.hits) == (100, 112, 2)


@pytest.mark.parametrize(("change", "reason"), [("bit", "altered"), ("cut", "torn"), ("other", "altered")])
def test_a_damaged_state_is_dropped_and_computed_again(change: str, reason: str, tmp_path: Path) -> None:
    (cold,), _, core = generate(tmp_path, [PROMPT])
    digests = core._blocks.page_digests([*PROMPT, *cold.outputs[0].token_ids], [])
    folder = shard_folder(core)
    path, other = (folder.path(digests[index], 1) for index in (24, 27))
    raw = bytearray(path.read_bytes())
    if change == "bit":
        raw[-1] ^= 1
    path.write_bytes({"bit": bytes(raw), "cut": bytes(raw[:-1]), "other": other.read_bytes()}[change])
    (again,), counts, _ = generate(tmp_path, [PROMPT])
    assert (again.cached_tokens, dict(counts.dropped)) == (0, {reason: 1})
    (warm,), counts, _ = generate(tmp_path, [PROMPT])
    assert (warm.cached_tokens, dict(counts.dropped)) == (100, {})


def test_pages_without_states_are_not_read(tmp_path: Path) -> None:
    _, _, core = generate(tmp_path, [PROMPT])
    for path in snapshots(core):
        path.unlink()
    (output,), counts, _ = generate(tmp_path, [PROMPT])
    assert (output.cached_tokens, counts.loaded, counts.misses) == (0, 0, 1)


def test_states_of_another_kind_are_not_looked_at(tmp_path: Path) -> None:
    (path,) = snapshots(generate(tmp_path, [PROMPT[:40]])[2])[:1]
    run = read_run(path)
    kind = run.kind
    other = PageLayoutKey(kind.model, (), kind.context, (StateKind(4, (("digest", (8,), "int8"),), 16),))
    assert not kind.matches(other)
    assert kind.key != other.key


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_restarts_and_losses_never_change_outputs(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    groups: tuple[KVGroupSpec, ...] = (FullAttention(num_pages=data.draw(st.integers(28, 48))),)
    if data.draw(st.booleans()):
        groups += (SlidingWindow(num_pages=40, window=data.draw(st.integers(2, 24))),)
    states = RecurrentState(
        num_slots=data.draw(st.integers(2, 12)), slot_bytes=16, every_page=data.draw(st.booleans())
    )
    rng = random.Random(data.draw(st.integers(0, 99)))
    for _ in range(3):
        prompts = [PROMPT[: rng.randrange(1, 90)] + [rng.randrange(3)] * rng.randrange(9) for _ in range(4)]
        _, counts, _ = generate(folder, prompts, groups=groups, states=states)
        assert set(counts.dropped) == set()
        for path in sorted(folder.rglob("*.safetensors")):
            if rng.random() < 0.1:
                path.unlink()


@settings(max_examples=200)
@given(data=st.data())
def test_a_load_ends_at_a_saved_state(data: st.DataObject) -> None:
    num_pages = data.draw(st.integers(1, 10))
    blocks = BlockManager(GROUPS, 4, states=TAILS)
    known, disk = ([[data.draw(st.booleans()) for _ in range(num_pages)] for _ in "ab"] for _ in "ab")
    digests = [Digest(bytes([index]) * 32) for index in range(num_pages)]

    def reach(have: list[list[bool]]) -> int:
        return next(n for n in range(num_pages, -1, -1) if n == 0 or (all(have[0][:n]) and have[1][n - 1]))

    fetch = prefetch_job(blocks, digests, known, reach(known))
    plan = fetch.plan(lambda digest, group: disk[group][digests.index(digest)])
    end = reach([[k or d for k, d in zip(*pair, strict=True)] for pair in zip(known, disk, strict=True)])
    wanted = {(0, i) for i in range(end) if not known[0][i]} | {(1, i) for i in {end - 1} if not known[1][i]}
    assert set(plan) == (wanted if end > reach(known) else set())
    assert plan == sorted(plan), "a state comes after the pages before it"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    engines: list[LLM] = []

    def make(states: RecurrentState = TAILS, **changes: object) -> LLM:
        fake = FakeCore(groups=GROUPS, states=states)
        engines.append(LLM(small_config(save_dir=tmp_path, **changes), core_factory=fake))
        return engines[-1]

    yield make
    for llm in engines:
        llm.close()


def test_a_saved_prompt_continues_from_its_state(engine: Callable[..., LLM], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    assert engine().save_prompt(PROMPT, path).num_pages == 25
    assert [part.indices for part in read_run(path).parts] == [(*range(25),), (24,)]
    llm = engine()
    assert llm.load_prompt(path).num_pages == 25
    (output,) = llm.generate([PROMPT], PARAMS, progress=False)
    assert output.cached_tokens == 100
    assert output.outputs[0].token_ids == alone(PROMPT, PARAMS).token_ids


@pytest.mark.parametrize("states", [TAILS, DENSE], ids=["tails", "every page"])
def test_a_saved_cache_has_all_states(
    states: RecurrentState, engine: Callable[..., LLM], tmp_path: Path
) -> None:
    prompts = [PROMPT[:41], [*PROMPT[:20], *range(30, 50)], [7] * 30]
    first = engine(states)
    said = first.generate(prompts, PARAMS, progress=False)
    turns = [[*prompt, *x.outputs[0].token_ids, 9] for prompt, x in zip(prompts, said, strict=True)]
    done = save_all(first._run_command, tmp_path / "cache")
    second = engine(states)
    loaded = load(second._run_command, tmp_path / "cache")
    assert (loaded.num_pages, loaded.num_skipped_pages) == (done.num_pages, 0)
    found = second.generate(turns, PARAMS, progress=False)
    assert [output.cached_tokens for output in found] == [52, 52, 40]
    for turn, output in zip(turns, found, strict=True):
        assert output.outputs[0].token_ids == alone(turn, PARAMS).token_ids


def test_states_keep_their_place_in_pages_of_another_size(engine: Callable[..., LLM], tmp_path: Path) -> None:
    engine().save_prompt(PROMPT[:33], tmp_path / "even.safetensors")  # the state is after 32 tokens
    engine().save_prompt(PROMPT[:37], tmp_path / "odd.safetensors")  # the state is after 36 tokens
    even, odd = (read_run(tmp_path / f"{name}.safetensors") for name in ("even", "odd"))
    kind = PageLayoutKey(
        even.kind.model, (replace(even.kind.specs[0], page_size=8),), states=even.kind.states
    )
    assert [(x.group, x.first, len(x.pages)) for x in segments(even, kind, 0)] == [(0, 0, 4), (1, 3, 1)]
    assert [(x.group, x.first, len(x.pages)) for x in segments(odd, kind, 0)] == [(0, 0, 4)]
    (*_, state) = segments(even, kind, 0)
    assert state.pages.tobytes() == even.parts[1].pages.tobytes()


def test_states_kept_in_another_way_are_refused(engine: Callable[..., LLM], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    engine().save_prompt(PROMPT, path)
    run = read_run(path)
    entries = (("another", (8,), "uint8"),)
    kind = PageLayoutKey(run.kind.model, run.kind.specs, run.kind.context, (StateKind(4, entries, 16),))
    write_run(tmp_path / "y.safetensors", PageRun(kind, run.parent, run.token_ids, run.parts, run.salt))
    with pytest.raises(InvalidRequest, match="nothing was loaded: the states of recurrent layers"):
        engine().load_prompt(tmp_path / "y.safetensors")


def test_pages_without_bytes_are_files_too(tmp_path: Path) -> None:
    spec = PoolSpec(layers=(), num_pages=2, page_size=4, k_format="bf16", v_format="bf16")
    kind = PageLayoutKey("m", (spec,), states=(StateKind(4, (("s", (2,), "float32"),), 16),))
    state = np.arange(16, dtype=np.uint8)[None]
    parts = (PagePart((0, 1), np.empty((2, 0), np.uint8)), PagePart((1,), state))
    write_run(tmp_path / "x.safetensors", PageRun(kind, root(b""), tuple(range(8)), parts, b""))
    run = read_run(tmp_path / "x.safetensors")
    assert run.kind.matches(kind)
    assert [(x.group, x.first, x.pages.tobytes()) for x in segments(run, kind, 0)] == [
        (0, 0, b""), (1, 1, state.tobytes())
    ]  # fmt: skip


def test_a_remote_cache_is_asked_again_for_a_missing_state() -> None:
    digests = [Digest(bytes([number])) for number in range(4)]
    blocks, shards = BlockManager(GROUPS, 4, states=TAILS), object.__new__(RemoteShards)
    shards._is_down, shards._names = False, [dict[bytes, None].fromkeys(digests), {}]
    store = object.__new__(ShardStore)
    store.folder, store._blocks = shards, blocks

    def asks() -> bool:
        return store._may_ask(prefetch_job(blocks, digests, [[False] * 4] * 2, 0))

    assert asks(), "the pages were listed before the state was written"
    shards._names[1][digests[-1]] = None
    assert not asks()
