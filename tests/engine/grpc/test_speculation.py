"""Messages of steps with drafts. Tests in tests/engine/executor check that drafts change no output."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

import tiny_models
from octavo.engine import AsyncEngine
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.stats import Observer, StepRecord
from octavo.engine.client.client import Client
from octavo.engine.grpc.server import GrpcServer
from served import LOCAL, all_idle, eventually
from vllm_worker import ask

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("every_draft_is_computed")]

PROMPT = [17, 201, 33, 8, 150, 64, 90] * 3
NUM_TOKENS = 40


class Steps(Observer):
    num_steps = num_accepted = 0

    def step(self, record: StepRecord) -> None:
        self.num_steps += 1
        self.num_accepted += sum(num_accepted for _, num_accepted in record.drafts)

    def rejected(self, reason: str) -> None:
        raise AssertionError(reason)


@asynccontextmanager
async def serving(folder: Path, speculate: str) -> AsyncIterator[tuple[Client, Any, Steps]]:
    config = EngineConfig(model=str(folder), speculate=speculate, page_size=8, num_pages=96, max_running=8)
    steps = Steps()
    engine = AsyncEngine(config, observer=steps)
    await engine.start()
    server = GrpcServer(engine)
    address = str(await server.start(LOCAL))
    try:
        async with Client(address) as client, grpc.aio.insecure_channel(address) as channel:
            yield client, vllm_engine_pb2_grpc.VllmEngineStub(channel), steps
        await eventually(lambda: all_idle(engine), "pages come back")
    finally:
        await server.stop()


async def test_messages_carry_all_tokens_of_a_step_with_their_log_probabilities(tmp_path: Path) -> None:
    folder = tiny_models.make_model(tmp_path / "qwen3", "qwen3")
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=2, ignore_eos=True)
    async with serving(folder, f"draft:{folder}") as (client, stub, steps):
        deltas = [delta async for delta in client.generate(PROMPT, params)]
        assert len(deltas) <= steps.num_steps < 20
        request = ask(ids=PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, logprobs=2, ignore_eos=True)
        responses = [response async for response in stub.Generate(request)]
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert len(tokens) == NUM_TOKENS
    assert max(len(delta.token_ids) for delta in deltas) > 2
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    chunks = [each.chunk for each in responses if each.WhichOneof("response") == "chunk"]
    assert [token for chunk in chunks for token in chunk.token_ids] == tokens
    assert all(list(chunk.output_logprobs.token_ids) == list(chunk.token_ids) for chunk in chunks)
    ours = [entry.logprob for delta in deltas for entry in delta.logprobs]
    theirs = [each for chunk in chunks for each in chunk.output_logprobs.token_logprobs]
    assert theirs == np.array(ours, np.float32).tolist(), "one protocol has float64, the other float32"
