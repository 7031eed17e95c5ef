"""A client of vllm.grpc.engine.VllmEngine, as a router uses it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

import octavo.engine
from fakes import FakeCore
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.stats import Observer
from octavo.engine.core.engine_core import EngineCore
from served import Served, collect, served

DEMO = Path(octavo.engine.__file__).parent / "demo"
PROMPT = list(range(10, 40))


class DemoFiles(FakeCore):
    """A fake model with the demo model's files."""

    def __call__(self, config: EngineConfig, observer: Observer | None = None) -> EngineCore:
        core = super().__call__(config, observer)
        assert self.runner is not None
        core.info = self.runner.info = replace(self.runner.info, path=DEMO)
        return core


@dataclass
class Worker:
    its: Served
    stub: Any

    async def generate(self, **changes: Any) -> list[pb.GenerateResponse]:
        return [response async for response in self.stub.Generate(ask(**changes))]


@asynccontextmanager
async def worker(core: FakeCore | None = None, **options: Any) -> AsyncIterator[Worker]:
    async with served(core, **options) as its, its.channel() as channel:
        yield Worker(its, vllm_engine_pb2_grpc.VllmEngineStub(channel))


def ask(*, ids: list[int] | None = None, stream: bool = True, **changes: Any) -> pb.GenerateRequest:
    """A router's request: greedy, five tokens."""
    fields = {
        key: changes.pop(key) for key in tuple(changes) if key in pb.GenerateRequest.DESCRIPTOR.fields_by_name
    }
    sampling = {
        "max_tokens": 5, "temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "n": 1,
    } | changes  # fmt: skip
    tokenized = pb.TokenizedInput(original_text="x", input_ids=PROMPT if ids is None else ids)
    if not fields.keys() & {"text"}:
        fields["tokenized"] = tokenized
    return pb.GenerateRequest(stream=stream, sampling_params=pb.SamplingParams(**sampling), **fields)


def by_index(responses: list[pb.GenerateResponse]) -> dict[int, tuple[list[Any], Any]]:
    found: dict[int, tuple[list[Any], Any]] = {}
    for response in responses:
        kind = response.WhichOneof("response")
        part = getattr(response, kind)
        chunks, complete = found.get(part.index, ([], None))
        assert complete is None, f"sample {part.index} goes on after its end"
        found[part.index] = ([*chunks, part], None) if kind == "chunk" else (chunks, part)
    assert all(complete is not None for _, complete in found.values())
    return found


async def alone(its: Served, params: SamplingParams) -> dict[int, tuple[int, ...]]:
    """Return octavo.v1's output for the prompt."""
    return {i: d.token_ids for i, d in (await collect(its.client.generate(PROMPT, params))).items()}


def pause() -> None:
    time.sleep(0.002)
