from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from engines import Gate
from fakes import FakeCore, small_config
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.outputs import Delta, FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.structured_output import StructuredOutput
from octavo.proto import generation_pb2 as pb
from served import all_idle, collect, eventually, served
from vllm_worker import by_index, pause, worker

pytestmark = pytest.mark.server

PAIR = {
    "type": "array",
    "prefixItems": [{"type": "integer"}, {"enum": ["a", "b"]}],
    "minItems": 2,
    "items": False,
}


def _params(constraint: StructuredOutput, **changes: Any) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": 60, "structured": constraint} | changes
    return SamplingParams(**fields)


async def test_every_sample_obeys_and_ends_by_itself() -> None:
    async with served() as its:
        params = _params(
            StructuredOutput(json_schema=PAIR), n=3, temperature=1.0, seed=2, logprobs=1, ignore_eos=True
        )
        whole = await collect(its.client.generate("hello", params))
    assert len({delta.text for delta in whole.values()}) > 1
    for delta in whole.values():
        number, letter = json.loads(delta.text)
        assert isinstance(number, int)
        assert letter in ("a", "b")
        assert delta.finish_reason is FinishReason.STOP
        assert len(delta.logprobs) == len(delta.token_ids)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"json_schema": json.dumps({"type": "integer", "minimum": 10, "maximum": 99})}, r"\d\d"),
        ({"json_object": True}, r"\{.*"),
        ({"regex": "[xyz]{7}"}, "[xyz]{7}"),
        ({"grammar": 'start: /[pq]{3}/ "!"'}, "[pq]{3}!"),
        ({"choice": vllm.ChoiceConstraint(choices=["left", "right"])}, "left|right"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_routers_constraints_are_obeyed(fields: dict[str, Any], pattern: str, stream: bool) -> None:
    async with worker() as its:
        found = by_index(
            await its.generate(stream=stream, max_tokens=40, temperature=1.0, seed=1, n=2, **fields)
        )
    for chunks, complete in found.values():
        ids = sum((tuple(c.token_ids) for c in chunks), ()) if stream else tuple(complete.output_ids)
        assert re.fullmatch(pattern, bytes(token for token in ids if token < 256).decode(), re.DOTALL)


async def test_json_object_false_is_no_constraint() -> None:
    async with worker() as its:
        [free] = await its.generate(stream=False)
        [same] = await its.generate(stream=False, json_object=False)
    assert free.complete.output_ids == same.complete.output_ids


async def test_a_bad_schema_is_refused_before_anything_is_queued() -> None:
    async with served() as its:
        with pytest.raises(InvalidRequest, match="json_schema cannot be used: Invalid type: strin"):
            await collect(its.client.generate("x", _params(StructuredOutput(json_schema={"type": "strin"}))))
        assert its.num_steps == 0
        empty = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(structured=pb.Structured()))
        with pytest.raises(grpc.aio.AioRpcError, match="structured must have one field set"):
            await its.client.stub.Generate(empty).read()


async def test_a_constraint_outlives_preemption() -> None:
    prompts = [f"number {number}: " for number in range(12)]
    params = [
        _params(
            StructuredOutput(regex=f"([ab]{{{number}}}-){{8}}"), temperature=1.0, seed=number, max_tokens=120
        )
        for number in range(1, 13)
    ]

    async def run(num_pages: int, together: bool) -> tuple[list[Delta], int]:
        gate = Gate()
        core = FakeCore(before_step=gate)
        async with served(core, config=small_config(num_pages=num_pages)) as its:
            jobs = [collect(its.client.generate(p, q)) for p, q in zip(prompts, params, strict=True)]
            if together:
                tasks = [asyncio.create_task(job) for job in jobs]
                await eventually(lambda: len(its.engine._open.streams()) == len(jobs), "all are in")
                gate.open()
                whole = await asyncio.gather(*tasks)
            else:
                gate.open()
                whole = [await job for job in jobs]
            await eventually(lambda: all_idle(its.engine), "all pages idle")
            assert core.core is not None
            return [found[0] for found in whole], core.core._scheduler.num_preemptions

    alone, _ = await run(128, together=False)
    crowded, num_preemptions = await run(44, together=True)
    assert num_preemptions > 0
    assert [delta.token_ids for delta in crowded] == [delta.token_ids for delta in alone]
    for number, delta in enumerate(crowded, start=1):
        assert re.fullmatch(f"([ab]{{{number}}}-){{8}}", delta.text)


async def test_streams_continue_while_a_grammar_is_compiled() -> None:
    async with served(FakeCore(before_step=pause)) as its:
        free = asyncio.create_task(collect(its.client.generate("x", SamplingParams(max_tokens=60))))
        big = StructuredOutput(json_schema={"enum": [f"value {number} of many" for number in range(3000)]})
        whole = (await collect(its.client.generate("x", _params(big))))[0]
        assert json.loads(whole.text).endswith("of many")
        assert (await free)[0].finish_reason is FinishReason.LENGTH
