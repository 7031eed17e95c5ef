from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import recurrent_models
from native import require_extension
from octavo.engine import LLM
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import RequestFailed
from octavo.engine.api.outputs import FinishReason, RequestOutput
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.core.snapshots import load, save_all
from served import collect, eventually, served

pytestmark = pytest.mark.server

PROMPTS = np.random.default_rng(11).integers(0, 300, (4, 17)).tolist()
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


class RealCore:
    core: EngineCore | None = None
    runner = None

    def __call__(self, config: EngineConfig, observer: object = None) -> EngineCore:
        del observer
        self.core = build_core(config)
        return self.core

    def check(self) -> None:
        assert self.core is not None
        blocks = self.core._blocks
        blocks.check()
        counts = blocks.state_counts
        assert counts is not None
        assert (blocks.counts.held, counts.held) == (0, 0)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("lfm2", "rwkv7")]


@pytest.fixture(scope="module", params=["qwen3_next", *SLOW])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recurrent_models.make_folder(tmp_path_factory.mktemp(request.param), request.param)


def config(folder: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "page_size": 8, "num_pages": 64, "max_running": 4, "max_step_tokens": 16, "max_model_len": 256,
        "state_memory": 2**20, "backend": "reference",
    }  # fmt: skip
    return EngineConfig(model=str(folder), **settings | changes)


async def test_streams_are_the_same_alone_together_and_from_the_prefix_cache(folder: Path) -> None:
    cold = RealCore()
    async with served(cold, config=config(folder, prefix_cache=False)) as its:  # type: ignore[arg-type]
        alone = [(await collect(its.client.generate(prompt, GREEDY)))[0] for prompt in PROMPTS]
        turns = [[*p, *d.token_ids, 1, 2, 3] for p, d in zip(PROMPTS, alone, strict=True)]
        wanted = [(await collect(its.client.generate(turn, GREEDY)))[0].token_ids for turn in turns]
    assert all(delta.finish_reason is FinishReason.LENGTH for delta in alone)
    assert len({delta.token_ids for delta in alone}) > 1
    cold.check()
    core = RealCore()
    async with served(core, config=config(folder)) as its:  # type: ignore[arg-type]
        got = await asyncio.gather(*(collect(its.client.generate(prompt, GREEDY)) for prompt in PROMPTS))
        assert [deltas[0].token_ids for deltas in got] == [delta.token_ids for delta in alone]
        for number, (turn, tokens) in enumerate(zip(turns, wanted, strict=True)):
            next_turn = its.client.generate(turn, GREEDY, request_id=f"turn {number}")
            assert (await collect(next_turn))[0].token_ids == tokens
            assert core.core is not None
            assert core.core.cache.remembered(f"turn {number}").lookup.num_hit == 40, (
                "no state was found again"
            )
    core.check()


async def test_a_miss_without_a_state_names_the_state_before(tmp_path: Path) -> None:
    core = RealCore()
    first = list(range(10, 55))
    prompts = {
        "junction": [*first[:27], *range(100, 120)],
        "found": [*first[:27], *range(120, 140)],
        "behind it": [*first[:36], *range(140, 150)],
    }
    short = replace(GREEDY, max_tokens=2)
    its_folder = recurrent_models.make_folder(tmp_path, "qwen3_next")
    async with served(core, config=config(its_folder)) as its:  # type: ignore[arg-type]
        assert core.core is not None
        states = core.core.info.states
        assert states is not None
        assert not states.every_page
        await collect(its.client.generate(first, short))
        said: dict[str, str] = {}
        for name, prompt in prompts.items():
            await collect(its.client.generate(prompt, short, request_id=name))
            said[name] = (await its.client.cache.explain(name)).text
    assert said["junction"].startswith("0 of 47 prompt tokens were cached")
    assert (
        "reach to position 24, but no recurrent state is cached there; no earlier state is cached"
        in said["junction"]
    )
    assert said["found"].startswith("24 of 47 prompt tokens were cached")
    assert said["behind it"].startswith("24 of 46 prompt tokens were cached")
    assert (
        "reach to position 32, but no recurrent state is cached there; the state before is at 24"
        in said["behind it"]
    )
    core.check()


async def test_samples_of_a_prompt_fork_its_state(folder: Path) -> None:
    core = RealCore()
    params = SamplingParams(max_tokens=10, temperature=30.0, seed=5, n=3, ignore_eos=True)
    async with served(core, config=config(folder)) as its:  # type: ignore[arg-type]
        both = await collect(its.client.generate(PROMPTS[0], params))
        first = await collect(its.client.generate(PROMPTS[0], params))
    assert len({delta.token_ids for delta in both.values()}) == 3
    assert {i: d.token_ids for i, d in both.items()} == {i: d.token_ids for i, d in first.items()}
    core.check()


async def test_a_request_without_a_slot_waits_for_one(folder: Path) -> None:
    core = RealCore()
    async with served(core, config=config(folder)) as its:  # type: ignore[arg-type]
        assert its.engine.info.states is not None
        slot_bytes = its.engine.info.states.slot_bytes
        wanted = [(await collect(its.client.generate(prompt, GREEDY)))[0].token_ids for prompt in PROMPTS]
    core.check()
    core = RealCore()
    small = config(folder, state_memory=2 * slot_bytes, num_pages=14)
    async with served(core, config=small) as its:  # type: ignore[arg-type]
        got = await asyncio.gather(*(collect(its.client.generate(prompt, GREEDY)) for prompt in PROMPTS))
        assert [deltas[0].token_ids for deltas in got] == wanted
        cancelled = its.client.generate(PROMPTS[0], SamplingParams(max_tokens=90, temperature=0))
        await anext(cancelled)
        await cancelled.aclose()
        await eventually(lambda: its.engine.gauges().num_running == 0, "the cancelled request is gone")
    core.check()


@pytest.mark.parametrize(
    "name", ["qwen3_5", "mamba", pytest.param("recurrent_gemma", marks=pytest.mark.slow)]
)
async def test_native_kernels_stream_the_same_however_they_are_served(name: str, tmp_path: Path) -> None:
    require_extension()
    folder = recurrent_models.make_folder(tmp_path / "model", name)
    native = {"backend": "cpu", "weights": "keep"}
    core = RealCore()
    async with served(core, config=config(folder, threads=1, prefix_cache=False, **native)) as its:  # type: ignore[arg-type]
        alone = [(await collect(its.client.generate(prompt, GREEDY)))[0].token_ids for prompt in PROMPTS]
        assert its.engine.info.recurrent
    assert len(set(alone)) > 1
    core = RealCore()
    changes = {"threads": 2, "max_step_tokens": 7, **native}
    async with served(core, config=config(folder, **changes)) as its:  # type: ignore[arg-type]
        for _ in range(2):
            got = await asyncio.gather(*(collect(its.client.generate(prompt, GREEDY)) for prompt in PROMPTS))
            assert [deltas[0].token_ids for deltas in got] == alone
    core.check()


def test_models_without_attention_have_no_residual_window(tmp_path: Path) -> None:
    folder = recurrent_models.make_folder(tmp_path / "model", "mamba2", mx.float32)
    settings = config(folder, kv_format="fp4", cache_dir=tmp_path / "pages")
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    assert settings.residual is not None
    with LLM(settings) as llm:
        (output,) = llm.generate([PROMPTS[0]], params, progress=False)
        assert len(llm.info.groups) <= 1
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("name", "backend"),
    [("qwen3_5", "cpu"), ("mamba2", "cpu"),
     pytest.param("lfm2", "reference", marks=pytest.mark.slow),
     pytest.param("recurrent_gemma", "cpu", marks=pytest.mark.slow),
     pytest.param("rwkv7", "cpu", marks=pytest.mark.slow)],
)  # fmt: skip
def test_bits_are_the_same_cold_and_from_disk(name: str, backend: str, tmp_path: Path) -> None:
    if backend == "cpu":
        require_extension()
    folder = recurrent_models.make_folder(tmp_path / "model", name, mx.bfloat16)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=0)
    places = {"cache_dir": tmp_path / "pages", "save_dir": tmp_path / "saved"}
    settings = config(folder, backend=backend, **places, **({"weights": "keep"} if backend == "cpu" else {}))

    def engine(prompts: list[list[int]], **changes: Any) -> tuple[list[RequestOutput], LLM]:
        llm = LLM(replace(settings, **changes))
        return llm.generate(prompts, params, progress=False), llm

    def said(outputs: list[RequestOutput]) -> list[tuple[object, ...]]:
        return [
            (tuple(x.token_ids), tuple(p.logprob for p in x.logprobs or ()))
            for (x,) in (o.outputs for o in outputs)
        ]

    first, llm = engine(PROMPTS)
    turns = [[*p, *o.outputs[0].token_ids, 1, 2, 3] for p, o in zip(PROMPTS, first, strict=True)]
    llm.close()
    cold, llm = engine([*PROMPTS, *turns], prefix_cache=False, cache_dir=None, save_dir=None)
    llm.close()
    assert len({tokens for tokens, _ in said(cold)}) > 1
    warm, llm = engine([*PROMPTS, *turns])
    assert [output.cached_tokens for output in warm] == [16] * 4 + [32] * 4
    assert said(warm) == said(cold)
    save_all(llm._run_command, tmp_path / "saved" / "all")
    llm.close()
    _, llm = engine([], cache_dir=None)
    assert load(llm._run_command, tmp_path / "saved" / "all").num_skipped_pages == 0
    again = llm.generate(turns, params, progress=False)
    llm.close()
    assert [output.cached_tokens for output in again] == [32] * 4
    assert said(again) == said(cold)[4:]


async def test_a_nan_in_a_state_ends_its_request_alone(folder: Path) -> None:
    core = RealCore()
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    async with served(core, config=config(folder, backend="cpu")) as its:  # type: ignore[arg-type]
        wanted = (await collect(its.client.generate(PROMPTS[1], GREEDY)))[0].token_ids
        assert core.core is not None
        states = core.core._runner._model.states  # type: ignore[attr-defined]
        committed, steps = states.commit, itertools.count()

        def broken() -> None:
            committed()
            if next(steps) < 9:
                return
            (running,) = [s.table.state.running for s in core.core._scheduler._queues.running if s.table][:1]  # type: ignore[union-attr]
            bad = {
                name: mx.full((1, *entry.shape), float("nan"), entry.dtype)
                for name, entry in states.entries.items()
            }
            states._put([running], bad, states._positions[[running]].tolist())

        states.commit = broken
        with pytest.raises(RequestFailed, match="not finite"):
            await collect(its.client.generate(PROMPTS[0], params, request_id="victim"))
        states.commit = committed
        assert (await collect(its.client.generate(PROMPTS[1], GREEDY)))[0].token_ids == wanted
        again = its.client.generate(PROMPTS[0], GREEDY)
        assert (await collect(again))[0].finish_reason is FinishReason.LENGTH, "nothing of it was published"
    core.check()
