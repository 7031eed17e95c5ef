from __future__ import annotations

import asyncio
import json
import struct
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

import tiny_models
from draft_checks import SCHEMA
from octavo.engine import AsyncEngine
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.stats import Observer, StepRecord
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.client.client import Client
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.grpc.server import GrpcServer
from served import LOCAL, all_idle, eventually
from vllm_worker import ask

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("every_draft_is_computed")]

PIECE = [17, 201, 33, 8, 150, 64, 90]
PROMPT = PIECE * 3
SHARED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "seed": 5, "logprobs": 0, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "seed": 6, "logprobs": 3, "n": 2, "logit_bias": {PIECE[0]: 6.0, PIECE[1]: 6.0}},
    {"temperature": 0.6, "seed": 7, "logprobs": 1, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    {"temperature": 0.7, "seed": 8, "min_p": 0.1, "presence_penalty": 0.3, "logprobs": 0},
    {"temperature": 0.9, "seed": 9, "logprobs": 1, "schema": SCHEMA},
)


class Steps(Observer):
    def __init__(self) -> None:
        self.num_steps = self.num_accepted = self.num_rejected = 0

    def step(self, record: StepRecord) -> None:
        self.num_steps += 1
        for num_drafts, num_accepted in record.drafts:
            self.num_accepted += num_accepted
            self.num_rejected += num_drafts - num_accepted

    def rejected(self, reason: str) -> None:
        raise AssertionError(reason)


@dataclass
class Said:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    end: str = ""


Answers = list[dict[int, Said]]


@dataclass
class Server:
    engine: AsyncEngine
    client: Client
    vllm: Any
    steps: Steps
    core: EngineCore


@asynccontextmanager
async def serving(folder: Path, speculate: str, **changes: Any) -> AsyncIterator[Server]:
    settings: dict[str, Any] = {"page_size": 8, "num_pages": 96, "max_running": 8, "max_step_tokens": 96}
    config = EngineConfig(model=str(folder), speculate=speculate, draft_tokens=6, **settings | changes)
    made: list[EngineCore] = []

    def core_of(config: EngineConfig, observer: Observer | None = None) -> EngineCore:
        made.append(build_core(config, observer))
        return made[0]

    steps = Steps()
    engine = AsyncEngine(config, core_factory=core_of, observer=steps)
    await engine.start()
    server = GrpcServer(engine)
    address = str(await server.start(LOCAL))
    try:
        async with Client(address) as client, _channel(address) as channel:
            yield Server(engine, client, vllm_engine_pb2_grpc.VllmEngineStub(channel), steps, made[0])
        await eventually(lambda: all_idle(engine), "pages come back")
        made[0]._blocks.check()
    finally:
        await server.stop()


def _channel(address: str) -> Any:
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


async def through_octavo(client: Client, settings: dict[str, Any], **own: Any) -> dict[int, Said]:
    fields = dict(settings)
    schema = fields.pop("schema", None)
    structured = None if schema is None else StructuredOutput(json_schema=schema)
    params = SamplingParams(max_tokens=40, ignore_eos=True, structured=structured, **fields, **own)
    said: dict[int, Said] = defaultdict(Said)
    async for delta in client.generate(PROMPT, params):
        each = said[delta.index]
        assert len(delta.logprobs) == len(delta.token_ids), "each token comes with its own"
        each.tokens += delta.token_ids
        each.logprobs += [(entry.logprob, tuple(entry.top)) for entry in delta.logprobs]
        each.sizes.append(len(delta.token_ids))
        each.end = "" if delta.finish_reason is None else delta.finish_reason.value
    return dict(said)


async def through_vllm(stub: Any, settings: dict[str, Any]) -> dict[int, Said]:
    fields = dict(settings)
    if (schema := fields.pop("schema", None)) is not None:
        fields["json_schema"] = json.dumps(schema)
    said: dict[int, Said] = defaultdict(Said)
    async for response in stub.Generate(ask(ids=PROMPT, max_tokens=40, ignore_eos=True, **fields)):
        if response.WhichOneof("response") == "complete":
            said[response.complete.index].end = response.complete.finish_reason
            continue
        chunk: pb.GenerateStreamChunk = response.chunk
        found = chunk.output_logprobs
        assert list(found.token_ids) == list(chunk.token_ids), "each token comes with its own"
        each = said[chunk.index]
        each.tokens += chunk.token_ids
        tops = [tuple(zip(top.token_ids, top.values, strict=True)) for top in found.top_logprobs]
        each.logprobs += list(zip(found.token_logprobs, tops, strict=True))
        each.sizes.append(len(chunk.token_ids))
    return dict(said)


async def ask_all(server: Server) -> tuple[Answers, Answers]:
    octavo = asyncio.gather(*(through_octavo(server.client, settings) for settings in SHARED))
    vllm = asyncio.gather(*(through_vllm(server.vllm, settings) for settings in SHARED))
    return list(await octavo), list(await vllm)


def contents(answers: Answers) -> list[dict[int, Said]]:
    return [
        {index: replace(said, sizes=[]) for index, said in sorted(samples.items())} for samples in answers
    ]


def single(logprob: float) -> float:
    return float(struct.unpack("f", struct.pack("f", logprob))[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[Answers, Answers]:
    async def without() -> tuple[Answers, Answers]:
        async with serving(folder, "off") as server:
            answers = await ask_all(server)
            assert server.steps.num_accepted == server.steps.num_rejected == 0
            return answers

    return asyncio.run(without())


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "draft"])
async def test_both_services_say_the_same_with_drafts(
    folder: Path, plain: tuple[Answers, Answers], drafter: str
) -> None:
    speculate = f"draft:{folder}" if drafter == "draft" else drafter
    async with serving(folder, speculate) as server:
        octavo, vllm = await ask_all(server)
        assert server.steps.num_accepted > 20
    assert contents(octavo) == contents(plain[0])
    assert contents(vllm) == contents(plain[1])


async def test_messages_carry_all_tokens_of_a_step(folder: Path) -> None:
    settings = SHARED[0]
    async with serving(folder, "off") as server:
        expected = await through_octavo(server.client, settings)
    async with serving(folder, f"draft:{folder}") as server:
        for answering in (through_octavo(server.client, settings), through_vllm(server.vllm, settings)):
            server.steps.num_steps = 0
            said = (await answering)[0]
            assert said.tokens == expected[0].tokens
            assert sum(said.sizes) == 40
            assert len(said.sizes) <= server.steps.num_steps < 20
            assert max(said.sizes) > 2


async def test_both_services_say_the_same_to_the_bit(plain: tuple[Answers, Answers]) -> None:
    """Log probabilities are float64 in one protocol and float32 in the other."""
    for ours, theirs in zip(*plain, strict=True):
        for index, said in ours.items():
            assert theirs[index].tokens == said.tokens
            drawn = [entry[0] for entry in said.logprobs]  # type: ignore[index]
            assert [entry[0] for entry in theirs[index].logprobs] == [  # type: ignore[index]
                single(logprob) for logprob in drawn
            ]


async def test_a_request_may_ask_for_drafts_or_against_them(
    folder: Path, plain: tuple[Answers, Answers]
) -> None:
    expected = contents(plain[0])[0]
    async with serving(folder, "off") as server:
        said = await through_octavo(server.client, SHARED[0], speculate="ngram")
        assert server.steps.num_accepted > 0
        assert contents([said]) == [expected]
    async with serving(folder, "ngram") as server:
        said = await through_octavo(server.client, SHARED[0], speculate="off")
        assert server.steps.num_accepted == server.steps.num_rejected == 0
        assert contents([said]) == [expected]


async def test_pages_that_are_short_and_streams_that_are_cancelled(
    folder: Path, plain: tuple[Answers, Answers]
) -> None:
    async with serving(folder, "suffix", num_pages=20, kv_format="bf16") as server:

        async def leave() -> None:
            stream = server.client.generate(PROMPT, SamplingParams(max_tokens=80, ignore_eos=True))
            await anext(stream)
            await stream.aclose()

        async def cancel() -> None:
            call = server.vllm.Generate(ask(ids=PROMPT, max_tokens=80, ignore_eos=True))
            await anext(aiter(call))
            call.cancel()

        answers, *_ = await asyncio.gather(ask_all(server), leave(), cancel(), leave(), cancel())
        assert server.core._scheduler.num_preemptions > 0
        assert server.steps.num_accepted > 20
    assert contents(answers[0]) == contents(plain[0])
    assert contents(answers[1]) == contents(plain[1])
