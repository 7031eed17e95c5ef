from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

import recurrent_models
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore
from served import Served, collect, eventually, served

pytestmark = pytest.mark.server

NUM_PROMPTS, NUM_ROUNDS, PER_ROUND = 12, 12, 10


class RealCore:
    core: EngineCore
    runner = None

    def __call__(self, config: EngineConfig, observer: object = None) -> EngineCore:
        del observer
        self.core = build_core(config)
        return self.core


def greedy(num_samples: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, n=num_samples)


def settings(folder: Path, *, num_pages: int, state_memory: int, prefix_cache: bool = True) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        backend="cpu",
        page_size=8,
        num_pages=num_pages,
        state_memory=state_memory,
        max_running=4,
        max_step_tokens=16,
        max_model_len=256,
        prefix_cache=prefix_cache,
    )


async def request(its: Served, rng: random.Random, alone: dict[tuple[int, ...], tuple[int, ...]]) -> None:
    prompt = rng.choice(list(alone))
    stream = its.client.generate(list(prompt), greedy(rng.choice([1, 1, 2])))
    if rng.random() < 0.3:
        for _ in range(rng.randrange(1, 5)):
            await anext(stream, None)  # a slow client may get all tokens in one message
        await stream.aclose()
        return
    for delta in (await collect(stream)).values():
        assert delta.token_ids == alone[prompt]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "state_memory"), [("lfm2", 20_000), ("qwen3_next", 400_000), ("rwkv7", 200_000)]
)
async def test_a_soak_with_cancellations_ends_with_every_slot_idle(
    tmp_path: Path, name: str, state_memory: int
) -> None:
    folder, rng = recurrent_models.make_folder(tmp_path, name), random.Random(3)
    common = [rng.randrange(300) for _ in range(60)]
    prompts = [
        common[: rng.randrange(8, 60)] + [rng.randrange(300) for _ in range(rng.randrange(1, 12))]
        for _ in range(NUM_PROMPTS)
    ]
    alone = {}
    roomy = settings(folder, num_pages=64, state_memory=2**20, prefix_cache=False)
    async with served(RealCore(), config=roomy) as its:  # type: ignore[arg-type]
        for prompt in prompts:
            alone[tuple(prompt)] = (await collect(its.client.generate(prompt, greedy())))[0].token_ids
    core = RealCore()
    tight = settings(folder, num_pages=18, state_memory=state_memory)
    async with served(core, config=tight) as its:  # type: ignore[arg-type]
        for _ in range(NUM_ROUNDS):
            await asyncio.gather(*(request(its, rng, alone) for _ in range(PER_ROUND)))
        await eventually(lambda: its.engine.gauges().num_running == 0, "nothing runs")
        blocks = core.core._blocks
        assert core.core._scheduler.num_preemptions > 0, "nobody was short of pages"
    blocks.check()
    counts = blocks.state_counts
    assert counts is not None
    assert (blocks.num_held, counts.held) == (0, 0)
    assert counts.idle_cached > 0
