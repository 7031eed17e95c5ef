from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from pathlib import Path

import mlx.core as mx
import pytest

import tiny_adapters
import tiny_models
from native import require_extension
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidRequest, NotFound
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.frontend.async_engine import AsyncEngine

pytestmark = [pytest.mark.parity, pytest.mark.slow]

NUM_ADAPTERS, NUM_SLOTS, NUM_REQUESTS = 200, 8, 400
LORA_MEMORY = 8 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_extension()
    root = tmp_path_factory.mktemp("many")
    folder = tiny_models.make_model(root / "model", "qwen3", dtype=mx.float32, num_hidden_layers=2)
    for index in range(NUM_ADAPTERS):
        where, rank = root / f"{index}", 1 + index % 5
        keys = tiny_adapters.ATTENTION
        tiny_adapters.make_adapter(where, folder, rank=rank, seed=index, num_layers=2, keys=keys)
    return folder


async def test_every_output_is_that_of_the_request_alone(model: Path) -> None:
    rng = random.Random(5)
    config = EngineConfig(
        model=str(model), page_size=16, kv_format="fp16", num_pages=120, max_running=16, max_step_tokens=64,
        max_loras=NUM_SLOTS, lora_memory=LORA_MEMORY,
    )  # fmt: skip
    engine = AsyncEngine(config)
    await engine.start()
    client = engine._client
    core = client._core  # type: ignore[union-attr]
    adapters = core._runner.adapters
    num_cancelled = num_refused = 0

    async def serve(prompt: list[int], name: str | None, params: SamplingParams, most: int) -> list[int]:
        tokens: list[int] = []
        async with aclosing(engine.generate(prompt, params, adapter=name)) as deltas:
            async for delta in deltas:
                assert delta.error is None, delta.error
                tokens += delta.token_ids
                if len(tokens) >= most:
                    break
        return tokens

    async def one() -> tuple[list[int], str | None, SamplingParams, list[int]] | None:
        nonlocal num_cancelled, num_refused
        await asyncio.sleep(rng.random() * 4)
        name = rng.choice([None, *map(str, range(NUM_ADAPTERS))])
        if rng.random() < 0.2 and name is not None:
            try:
                await engine.unload_adapter(name)
                await engine.load_adapter(name, model.parent / name)
            except (InvalidRequest, NotFound):  # the adapter is in use or being loaded or unloaded
                num_refused += 1
        params = SamplingParams(max_tokens=rng.randint(1, 12), temperature=0, ignore_eos=True)
        prompt = [rng.randrange(300) for _ in range(rng.choice([3, 20, 70]))]
        cancels = rng.random() < 0.2
        try:
            tokens = await serve(prompt, name, params, 1 if cancels else 99)
        except NotFound:  # unloaded in the meantime
            num_refused += 1
            return None
        num_cancelled += cancels
        return None if cancels else (prompt, name, params, tokens)

    try:
        for index in range(NUM_ADAPTERS):
            await engine.load_adapter(str(index), model.parent / f"{index}")
        assert adapters.nbytes <= LORA_MEMORY
        done = await asyncio.gather(*(one() for _ in range(NUM_REQUESTS)))
        assert adapters.num_swaps > NUM_SLOTS * 4, "adapters took turns in the slots"
        assert num_cancelled > 20
        await asyncio.sleep(0.2)
        assert adapters.held == ()
        assert adapters.nbytes <= LORA_MEMORY
        assert core.gauges.pages_held == 0
        finished = [each for each in done if each is not None]
        assert len(finished) > NUM_REQUESTS // 2
        for prompt, name, params, tokens in finished:
            assert await serve(prompt, name, params, 99) == tokens
    finally:
        await engine.stop()
