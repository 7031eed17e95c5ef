from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines import Gate
from ledger_runner import ALPHABET
from octavo.engine.api.sampling_params import SamplingParams
from served import all_idle, eventually
from vllm_worker import PROMPT, alone, ask, by_index, worker

pytestmark = pytest.mark.server

INVALID = grpc.StatusCode.INVALID_ARGUMENT
POISON = 7


async def test_a_stream_is_deltas_and_then_the_last_one_again() -> None:
    async with worker(gate=(gate := Gate())) as its:
        stream = aiter(its.stub.Generate(ask(max_tokens=9)))
        gate.allow(1)
        first = await anext(stream)
        gate.open()
        [(chunks, complete)] = by_index([first, *[response async for response in stream]]).values()
        expected = (await alone(its.its, SamplingParams(max_tokens=9)))[0]
    assert sum((tuple(chunk.token_ids) for chunk in chunks), ()) == expected
    assert len(chunks) > 1
    assert all(chunk.completion_tokens == len(chunk.token_ids) > 0 for chunk in chunks)
    assert all(chunk.prompt_tokens == len(PROMPT) for chunk in chunks)
    assert complete.output_ids == chunks[-1].token_ids
    assert complete.completion_tokens == chunks[-1].completion_tokens
    assert complete.finish_reason == "length"
    assert complete.WhichOneof("matched_stop") is None


async def test_without_stream_there_is_one_complete_with_everything() -> None:
    async with worker() as its:
        [response] = await its.generate(stream=False, max_tokens=9)
        expected = (await alone(its.its, SamplingParams(max_tokens=9)))[0]
    complete = response.complete
    assert tuple(complete.output_ids) == expected
    assert (complete.prompt_tokens, complete.completion_tokens) == (len(PROMPT), 9)
    assert complete.finish_reason == "length"


async def test_cached_tokens_are_reported() -> None:
    async with worker() as its:
        [first] = await its.generate(stream=False)
        [second] = await its.generate(stream=False)
    assert first.complete.cached_tokens == 0
    assert second.complete.cached_tokens == 28, "seven pages of four, never the last token"
    assert first.complete.output_ids == second.complete.output_ids


@pytest.mark.parametrize("stream", [True, False])
async def test_every_sample_has_its_chunks_and_its_complete(stream: bool) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=3)
    async with worker() as its:
        found = by_index(await its.generate(stream=stream, max_tokens=6, temperature=1.0, seed=3, n=3))
        expected = await alone(its.its, params)
    assert found.keys() == {0, 1, 2}
    for index, (chunks, complete) in found.items():
        ids = sum((tuple(c.token_ids) for c in chunks), ()) if stream else tuple(complete.output_ids)
        assert ids == expected[index]
    assert len(set(expected.values())) > 1, "the seeds of the samples differ"


async def test_a_stop_id_is_part_of_the_output_and_named() -> None:
    async with worker() as its:
        [(chunks, complete)] = by_index(await its.generate(stop_token_ids=list(ALPHABET))).values()
    assert [len(chunk.token_ids) for chunk in chunks] == [1]
    assert complete.output_ids == chunks[0].token_ids
    assert complete.finish_reason == "stop"
    assert complete.matched_token_id == chunks[0].token_ids[0]


async def test_a_stop_string_is_named() -> None:
    async with worker() as its:
        whole = bytes((await alone(its.its, SamplingParams(max_tokens=60)))[0]).decode()
        stop = whole[3:6]
        [response] = await its.generate(stream=False, max_tokens=60, stop=[stop])
        complete = response.complete
        end = whole.index(stop) + len(stop)
        assert bytes(complete.output_ids).decode() == whole[:end], "tokens of the stop string included"
        assert (complete.finish_reason, complete.matched_stop_str) == ("stop", stop)


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_come_with_their_tokens(stream: bool) -> None:
    async with worker() as its:
        [(chunks, complete)] = by_index(await its.generate(stream=stream, logprobs=2, max_tokens=3)).values()
        [(plain, end)] = by_index(await its.generate(stream=stream, max_tokens=3)).values()
    for part in [*chunks, complete]:
        ids = part.token_ids if isinstance(part, pb.GenerateStreamChunk) else part.output_ids
        assert part.output_logprobs.token_ids == ids
        assert list(part.output_logprobs.token_logprobs) == [-0.5] * len(ids)
        assert len(part.output_logprobs.top_logprobs) == len(ids)
    assert not any(part.HasField("output_logprobs") for part in [*plain, end])


async def test_an_abort_ends_the_stream_normally() -> None:
    async with worker(gate=(gate := Gate())) as its:
        call = its.stub.Generate(ask(request_id="gone", max_tokens=200))
        responses = aiter(call)
        gate.allow(3)
        assert (await anext(responses)).chunk.token_ids
        await its.stub.Abort(pb.AbortRequest(request_ids=["gone", "unknown"]))
        gate.open()
        rest = [response async for response in responses]
        assert rest[-1].complete.finish_reason == "abort"
        assert await call.code() is grpc.StatusCode.OK
        await eventually(lambda: all_idle(its.its.engine), "pages idle")


async def test_unset_numbers_mean_defaults() -> None:
    """proto3 cannot tell 0 from an unset number."""
    async with worker() as its:
        request = pb.GenerateRequest(
            text=bytes(PROMPT).decode(), sampling_params=pb.SamplingParams(max_tokens=5, temperature=0.0)
        )
        [greedy] = [response async for response in its.stub.Generate(request)]
        expected = (await alone(its.its, SamplingParams(max_tokens=5)))[0]
        assert tuple(greedy.complete.output_ids) == expected
        request.sampling_params.ClearField("temperature")
        request.sampling_params.seed = -7
        [sampled] = [response async for response in its.stub.Generate(request)]
        drawn = await alone(its.its, SamplingParams(max_tokens=5, temperature=1.0, seed=2**64 - 7))
        assert tuple(sampled.complete.output_ids) == drawn[0] != expected


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "empty prompt": ({"ids": []}, "empty"),
    "no input": ({"text": ""}, "empty"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "temperature": ({"temperature": -1.0}, "temperature"),
    "all logprobs": ({"logprobs": -1}, "logprobs"),
    "all prompt_logprobs": ({"prompt_logprobs": -1}, "prompt_logprobs"),
    "truncation": ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
    "json_schema": ({"json_schema": "{"}, "json_schema"),
    "regex": ({"regex": "(a"}, "regex"),
    "grammar": ({"grammar": "root ::= a"}, "grammar"),
    "structural_tag": ({"structural_tag": "{}"}, "structural_tag"),
    "choice": ({"choice": pb.ChoiceConstraint()}, "choice"),
    "empty choice": ({"choice": pb.ChoiceConstraint(choices=["a", ""])}, "choice"),
    "rank": ({"data_parallel_rank": 1}, "data_parallel_rank"),
    "transfer": ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
    "old transfer": ({"kv_transfer_params": pb.KvTransferParams(remote_host="a")}, "kv_transfer_params"),
    "images": ({"mm_inputs": pb.MultimodalInputs(im_token_id=1)}, "mm_inputs"),
    "more images": ({"extra_mm_inputs": [pb.MultimodalInputs()]}, "extra_mm_inputs"),
    "media": ({"media_refs": pb.MediaRefs()}, "media_refs"),
}


async def test_impossible_fields_are_refused_by_name() -> None:
    async with worker() as its:
        for case, (changes, hint) in REFUSED.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await its.generate(**changes)
            assert caught.value.code() is INVALID, case
            assert hint in (caught.value.details() or ""), case
        assert its.its.num_steps == 0
        [fine] = await its.generate(stream=False, json_object=False)
        assert len(fine.complete.output_ids) == 5
