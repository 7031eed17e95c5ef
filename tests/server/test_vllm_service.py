"""vllm.grpc.engine.VllmEngine: the answers of vLLM 0.32's own gRPC server, from Octavo."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import threading
import time
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import tokenizers
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

import octavo.engine
from fakes import ALPHABET, EOS, VOCAB_SIZE, FakeCore, small_config
from octavo.engine.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.params import SamplingParams
from octavo.engine.server.intake import Rate
from octavo.engine.server.model_files import read_model_files
from octavo.engine.stats import Observer
from served import Served, all_idle, collect, eventually, served

DEMO = Path(octavo.engine.__file__).parent / "demo"
PROMPT = list(range(10, 40))
INVALID = grpc.StatusCode.INVALID_ARGUMENT
POISON = 7


class DemoFiles(FakeCore):
    """A fake model with the files of the embedded one."""

    def __call__(self, config: EngineConfig, observer: Observer | None = None) -> EngineCore:
        core = super().__call__(config, observer)
        assert self.runner is not None
        self.runner.info = replace(self.runner.info, path=DEMO)
        return core


@dataclass
class Worker:
    """A server and the stub a router would use."""

    its: Served
    stub: Any

    async def generate(self, **changes: Any) -> list[pb.GenerateResponse]:
        return [response async for response in self.stub.Generate(ask(**changes))]


@asynccontextmanager
async def worker(core: FakeCore | None = None, **options: Any) -> AsyncIterator[Worker]:
    async with served(core, **options) as its, its.channel() as channel:
        yield Worker(its, vllm_engine_pb2_grpc.VllmEngineStub(channel))


def ask(*, ids: list[int] | None = None, stream: bool = True, **changes: Any) -> pb.GenerateRequest:
    """A request as a router writes it: greedy, five tokens."""
    fields = {
        key: changes.pop(key) for key in tuple(changes) if key in pb.GenerateRequest.DESCRIPTOR.fields_by_name
    }
    sampling = {
        "max_tokens": 5,
        "temperature": 0.0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "n": 1,
    } | changes
    tokenized = pb.TokenizedInput(original_text="x", input_ids=PROMPT if ids is None else ids)
    if not fields.keys() & {"text"}:
        fields["tokenized"] = tokenized
    return pb.GenerateRequest(stream=stream, sampling_params=pb.SamplingParams(**sampling), **fields)


def by_index(responses: list[pb.GenerateResponse]) -> dict[int, tuple[list[Any], Any]]:
    """Chunks and the one complete of each sample."""
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
    """What octavo.v1 says to the same prompt."""
    return {i: d.token_ids for i, d in (await collect(its.client.generate(PROMPT, params))).items()}


async def test_a_stream_is_deltas_and_then_the_last_one_again() -> None:
    async with worker(FakeCore(before_step=_pause)) as its:
        [(chunks, complete)] = by_index(await its.generate(max_tokens=9)).values()
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


async def test_nothing_but_max_tokens_ends_before_min_tokens() -> None:
    async with worker() as its:
        whole = bytes((await alone(its.its, SamplingParams(max_tokens=60)))[0]).decode()
        stop = next(c for c in whole if whole.count(c) > 6)
        [response] = await its.generate(stream=False, max_tokens=60, min_tokens=12, stop=[stop])
        assert len(response.complete.output_ids) == whole.index(stop, 12) + 1
        with pytest.raises(grpc.aio.AioRpcError, match="min_tokens"):
            await its.generate(max_tokens=4, min_tokens=5)


async def test_the_end_token_ends_and_is_part_of_the_output() -> None:
    async with worker(FakeCore(ends_every=5)) as its:
        [response] = await its.generate(stream=False, max_tokens=200)
        complete = response.complete
        assert (complete.finish_reason, complete.matched_token_id) == ("stop", EOS)
        assert complete.output_ids[-1] == EOS
        [longer] = await its.generate(stream=False, max_tokens=50, ignore_eos=True)
        assert len(longer.complete.output_ids) == 50


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
    async with worker(FakeCore(before_step=_pause)) as its:
        call = its.stub.Generate(ask(request_id="gone", max_tokens=200))
        responses = aiter(call)
        assert (await anext(responses)).chunk.token_ids
        await its.stub.Abort(pb.AbortRequest(request_ids=["gone", "unknown"]))
        rest = [response async for response in responses]
        assert rest[-1].complete.finish_reason == "abort"
        assert await call.code() is grpc.StatusCode.OK
        await eventually(lambda: all_idle(its.its.engine), "pages idle")


async def test_a_cancelled_call_and_a_deadline_free_their_pages() -> None:
    async with worker(FakeCore(before_step=_pause)) as its:
        call = its.stub.Generate(ask(max_tokens=200))
        await call.read()
        call.cancel()
        late = its.stub.Generate(ask(max_tokens=200), timeout=0.1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [response async for response in late]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: all_idle(its.its.engine), "pages idle")
        assert its.its.num_steps < 200


async def test_unset_numbers_mean_defaults() -> None:
    """proto3 cannot tell 0 from not set; only an unset temperature is sampled."""
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
    "id outside the vocabulary": ({"ids": [1, VOCAB_SIZE]}, str(VOCAB_SIZE)),
    "too long": ({"ids": [1] * 300}, "300"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "temperature": ({"temperature": -1.0}, "temperature"),
    "top_p": ({"top_p": 1.5}, "top_p"),
    "all logprobs": ({"logprobs": -1}, "logprobs"),
    "prompt_logprobs": ({"prompt_logprobs": 0}, "prompt_logprobs"),
    "truncation": ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
    "json_schema": ({"json_schema": "{}"}, "json_schema"),
    "json_object": ({"json_object": True}, "json_object"),
    "regex": ({"regex": "a+"}, "regex"),
    "grammar": ({"grammar": "root ::= 'a'"}, "grammar"),
    "structural_tag": ({"structural_tag": "{}"}, "structural_tag"),
    "choice": ({"choice": pb.ChoiceConstraint(choices=["a"])}, "choice"),
    "logit_bias": ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
    "negative logit_bias id": ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    "stop id": ({"stop_token_ids": [100_000]}, "100000"),
    "n": ({"n": 1000}, "1000"),
    "request id": ({"request_id": "x" * 300}, "request_id"),
    "rank": ({"data_parallel_rank": 1}, "data_parallel_rank"),
    "transfer": ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
    "old transfer": ({"kv_transfer_params": pb.KvTransferParams(remote_host="a")}, "kv_transfer_params"),
    "images": ({"mm_inputs": pb.MultimodalInputs(im_token_id=1)}, "mm_inputs"),
    "more images": ({"extra_mm_inputs": [pb.MultimodalInputs()]}, "extra_mm_inputs"),
    "media": ({"media_refs": pb.MediaRefs()}, "media_refs"),
}


async def test_what_is_not_possible_is_refused_by_name() -> None:
    async with worker() as its:
        for case, (changes, hint) in REFUSED.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await its.generate(**changes)
            assert caught.value.code() is INVALID, case
            assert hint in (caught.value.details() or ""), case
        assert its.its.num_steps == 0
        [fine] = await its.generate(stream=False, json_object=False)
        assert len(fine.complete.output_ids) == 5


async def test_a_request_that_fails_alone_ends_with_its_error() -> None:
    async with worker(FakeCore(poison=POISON)) as its:
        call = its.stub.Generate(ask(ids=[1, POISON]))
        responses: list[pb.GenerateResponse] = []

        async def read() -> None:
            async for response in call:
                responses.append(response)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read()
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert responses[-1].complete.finish_reason == "error"
        assert await its.generate(ids=[1, 2])


async def test_a_full_server_says_so_with_the_code_of_429() -> None:
    gate = threading.Event()
    core = FakeCore(before_step=lambda: _wait(gate))
    async with worker(core, config=small_config(max_running=1, max_waiting=1)) as its:
        inside = [asyncio.create_task(its.generate()) for _ in range(2)]
        await eventually(lambda: its.its.server.intake.num_active == 2, "both are in")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await its.generate()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        gate.set()
        assert all(by_index(responses) for responses in await asyncio.gather(*inside))


async def test_health_model_and_server() -> None:
    async with worker(DemoFiles()) as its:
        health = await its.stub.HealthCheck(pb.HealthCheckRequest())
        assert health.healthy
        info = await its.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.served_model_name, info.model_type, list(info.architectures)) == (
            "fake", "qwen3", ["Qwen3ForCausalLM"]
        )  # fmt: skip
        assert info.is_generation
        assert (info.vocab_size, info.max_context_length, info.max_req_input_len) == (VOCAB_SIZE, 4096, 255)
        assert list(info.eos_token_ids) == [EOS]
        assert info.tokenizer_path == "", "paths are nobody's business outside"
        await its.generate()
        server = await its.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.server_type, server.block_size, server.max_num_seqs) == ("vllm-grpc", 4, 8)
        assert (server.kv_cache_dtype, server.data_parallel_size) == ("bf16", 1)
        assert server.active_requests == 0
        assert abs(time.time() - server.last_receive_timestamp) < 60
        its.its.server.intake.draining = True
        health = await its.stub.HealthCheck(pb.HealthCheckRequest())
        assert (health.healthy, "draining" in health.message) == (False, True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await its.generate()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_dead_engine_is_not_healthy() -> None:
    def step() -> None:
        raise MemoryError("out of luck")

    async with worker(FakeCore(before_step=step)) as its:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await its.generate()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        health = await its.stub.HealthCheck(pb.HealthCheckRequest())
        assert (health.healthy, "out of luck" in health.message) == (False, True)


async def test_loads() -> None:
    async with worker(FakeCore(before_step=_pause)) as its:
        call = its.stub.Generate(ask(max_tokens=100))
        for _ in range(3):
            await call.read()
        reply = await its.stub.GetLoads(pb.GetLoadsRequest())
        [load] = reply.loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 0, 1)
        assert 30 < load.num_used_tokens < load.max_total_num_tokens == 256
        assert load.token_usage == load.num_used_tokens / 256
        assert load.gen_throughput > 0
        assert (load.max_running_requests, load.utilization, load.cache_hit_rate) == (8, 1 / 8, 0.0)
        assert not (await its.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))).loads
        call.cancel()
        await eventually(lambda: all_idle(its.its.engine), "pages idle")


async def test_the_tokenizer_comes_as_a_zip_in_chunks() -> None:
    async with worker(DemoFiles()) as its:
        parts = [part async for part in its.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        again = [part async for part in its.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(part.data for part in parts)
    assert all(len(part.data) <= 65536 for part in parts)
    assert [bool(part.sha256) for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].sha256 == hashlib.sha256(data).hexdigest() == again[-1].sha256
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(archive.namelist())
        assert not any("safetensors" in name for name in archive.namelist())
        tokenizer = tokenizers.Tokenizer.from_str(archive.read("tokenizer.json").decode())
        assert "chat_template" in json.loads(archive.read("tokenizer_config.json"))
    assert tokenizer.decode(tokenizer.encode("Once upon a time").ids) == "Once upon a time"


async def test_what_is_not_there_is_unimplemented() -> None:
    async with worker() as its:
        calls = {
            grpc.StatusCode.UNIMPLEMENTED: (
                its.stub.Embed(pb.EmbedRequest()),
                its.stub.StartProfile(common_pb2.StartProfileRequest()),
                its.stub.StopProfile(common_pb2.StopProfileRequest()),
                its.stub.FlushCache(common_pb2.FlushCacheRequest()),
                its.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read(),
            ),
            grpc.StatusCode.NOT_FOUND: (its.stub.GetTokenizer(common_pb2.GetTokenizerRequest()).read(),),
        }
        for code, awaitables in calls.items():
            for awaitable in awaitables:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await awaitable
                assert caught.value.code() is code


async def test_32_streams_say_what_each_says_alone() -> None:
    async with worker() as its:
        prompts = [[*PROMPT[:12], index] for index in range(32)]
        together = await asyncio.gather(
            *(its.generate(ids=prompt, stream=bool(i % 2)) for i, prompt in enumerate(prompts))
        )
        for prompt, responses in zip(prompts, together, strict=True):
            [(chunks, complete)] = by_index(responses).values()
            ids = sum((tuple(c.token_ids) for c in chunks), ()) or tuple(complete.output_ids)
            whole = await collect(its.its.client.generate(prompt, SamplingParams(max_tokens=5)))
            assert ids == whole[0].token_ids


def test_the_sampling_a_model_recommends(tmp_path: Path) -> None:
    assert read_model_files(tmp_path).temperature == 1.0
    assert read_model_files(tmp_path).sampling_json == ""
    settings = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [1]}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": [5, 6], "pad_token_id": None}))
    files = read_model_files(tmp_path)
    assert files.temperature == 0.6
    assert json.loads(files.sampling_json) == {"temperature": 0.6, "top_p": 0.9}
    assert (files.bos_token_id, files.pad_token_id, files.architectures) == (5, 0, ())


def test_a_rate_forgets_what_is_older_than_its_window() -> None:
    now = 0.0
    rate = Rate(10.0, clock=lambda: now)
    assert rate.per_second() == 0.0
    for moment in (1.0, 1.05, 2.0):
        now = moment
        rate.add(10)
    now = 4.0
    assert rate.per_second() == 30 / 4
    now = 11.5
    assert rate.per_second() == 10 / 10
    now = 20.0
    assert rate.per_second() == 0.0


def _pause() -> None:
    time.sleep(0.002)


def _wait(gate: threading.Event) -> None:
    assert gate.wait(30), "the gate was never opened"
