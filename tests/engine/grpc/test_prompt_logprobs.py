from __future__ import annotations

import asyncio

import pytest

from fakes import FakeCore, small_config
from octavo.engine.api.outputs import Delta, PromptLogprobs
from octavo.engine.api.sampling_params import SamplingParams
from served import served
from vllm_worker import PROMPT, by_index, worker

pytestmark = pytest.mark.server

ASKED = SamplingParams(max_tokens=4, prompt_logprobs=2, n=2)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_router_gets_them_once_per_sample(stream: bool) -> None:
    async with worker() as its:
        for _ in range(2):  # the second time, the prompt is cached
            found = by_index(await its.generate(stream=stream, prompt_logprobs=2, n=2, max_tokens=4))
            assert found.keys() == {0, 1}
            for chunks, complete in found.values():
                first, *others = [*chunks, complete]
                scores = first.input_logprobs
                assert list(scores.token_ids) == PROMPT
                assert not scores.token_logprobs[0].HasField("value")
                assert {entry.value for entry in scores.token_logprobs[1:]} == {-0.25}
                assert len(scores.top_logprobs) == len(PROMPT)
                assert first.cached_tokens == 0
                assert not any(part.HasField("input_logprobs") for part in others)


async def test_prompt_logprobs_come_once_with_the_first_delta() -> None:
    async with served() as its:
        whole: list[Delta] = [delta async for delta in its.client.generate(PROMPT, ASKED)]
        free = [delta async for delta in its.client.generate(PROMPT, SamplingParams(max_tokens=4))]
    for index in (0, 1):
        first, *others = [delta for delta in whole if delta.index == index]
        _check(first.prompt_logprobs, PROMPT)
        assert all(delta.prompt_logprobs is None for delta in others)
    assert all(delta.prompt_logprobs is None for delta in free)


def _check(found: PromptLogprobs | None, prompt: list[int]) -> None:
    assert found is not None
    assert [found.first_id, *(entry.token_id for entry in found.rest)] == prompt


async def test_a_crowded_pool_changes_nothing() -> None:
    prompts = [[number] * 50 + list(range(60)) for number in range(1, 9)]
    core = FakeCore()
    async with served(core, config=small_config(num_pages=70)) as its:

        async def one(prompt: list[int]) -> PromptLogprobs | None:
            params = SamplingParams(max_tokens=60, prompt_logprobs=0)
            deltas = [delta async for delta in its.client.generate(prompt, params)]
            return deltas[0].prompt_logprobs

        for prompt, found in zip(prompts, await asyncio.gather(*map(one, prompts)), strict=True):
            _check(found, prompt)
    assert core.core is not None
    assert core.core._scheduler.num_preemptions > 0
