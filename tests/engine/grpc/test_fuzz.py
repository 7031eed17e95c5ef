from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from fakes import FakeCore, small_config
from octavo.engine.api.sampling_params import SamplingParams
from octavo.proto import cache_pb2 as cache
from octavo.proto import generation_pb2 as octavo
from served import Served, all_idle, collect, eventually, served

pytestmark = pytest.mark.server

HONEST = SamplingParams(max_tokens=12, temperature=1.0, seed=4)
PROMPT = [65, 66, 67, 68, 69]
EXPECTED = {  # status codes that an invalid request may get
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
}
SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"]}'
TAGS = '{"triggers": ["a"], "structures": [{"begin": "a", "schema": {}, "end": "b"}]}'
METHODS: list[tuple[str, list[Message]]] = [
    ("/octavo.v1.Generation/Generate", [
        octavo.GenerateRequest(text="hello", sampling=octavo.SamplingParams(max_tokens=3, stop=["a"])),
        octavo.GenerateRequest(token_ids=octavo.TokenIds(ids=[1, 2, 3])),
        octavo.GenerateRequest(chat=octavo.Chat(messages=[octavo.ChatMessage(role="user", content="x")])),
    ]),
    ("/octavo.v1.Generation/Generate", [
        octavo.GenerateRequest(
            text="hello", priority=2,
            sampling=octavo.SamplingParams(
                max_tokens=5, prompt_logprobs=1, structured=octavo.Structured(json_schema=SCHEMA)
            ),
        ),
        octavo.GenerateRequest(
            text="x", sampling=octavo.SamplingParams(structured=octavo.Structured(regex="(ab|c)+[0-9]{2}"))
        ),
    ]),
    ("/octavo.v1.Generation/GenerateMany", [octavo.GenerateRequest(text="hello", request_id="many")]),
    ("/octavo.v1.Generation/Tokenize", [octavo.TokenizeRequest(text="hello")]),
    ("/octavo.v1.Generation/Detokenize", [octavo.DetokenizeRequest(token_ids=[1, 2])]),
    ("/octavo.v1.Generation/Embed", [
        octavo.EmbedRequest(text="hello", pooling=octavo.POOLING_MEAN, dimensions=2, normalize=False),
        octavo.EmbedRequest(token_ids=octavo.TokenIds(ids=[1, 2, 3])),
    ]),
    ("/octavo.v1.Generation/Rerank", [
        octavo.RerankRequest(query="q", documents=["a", "b"], yes="y", no="n", top_n=1),
        octavo.RerankRequest(query="q", documents=["a"], template="{document} {query}", instruction="i"),
    ]),
    ("/octavo.v1.Generation/Abort", [octavo.AbortRequest(request_ids=["nobody"])]),
    ("/octavo.v1.Cache/GetStats", [cache.GetStatsRequest(num_prefixes=3)]),
    ("/octavo.v1.Cache/Explain", [cache.ExplainRequest(request_id="many")]),
    ("/octavo.v1.Cache/Save", [cache.SaveRequest(path="x")]),
    ("/octavo.v1.Cache/Load", [cache.LoadRequest(path="x")]),
    ("/octavo.v1.Cache/Pin", [
        cache.PinRequest(name="p", prefix=cache.Prefix(token_ids=octavo.TokenIds(ids=PROMPT))),
        cache.PinRequest(name="q", prefix=cache.Prefix(request_id="many")),
    ]),
    ("/octavo.v1.Cache/Unpin", [cache.UnpinRequest(name="p")]),
    ("/octavo.v1.Cache/Flush", [cache.FlushRequest()]),
    ("/octavo.v1.Cache/Watch", [cache.WatchRequest(start_number=1), cache.WatchRequest(log_id="x")]),
    ("/vllm.grpc.engine.VllmEngine/SubscribeKvEvents", [
        common.SubscribeKvEventsRequest(), common.SubscribeKvEventsRequest(start_sequence_number=9),
    ]),
    ("/vllm.grpc.engine.VllmEngine/FlushCache", [common.FlushCacheRequest(timeout_s=0.01)]),
    ("/vllm.grpc.engine.VllmEngine/Generate", [
        vllm.GenerateRequest(
            request_id="v", tokenized=vllm.TokenizedInput(input_ids=[1, 2]), stream=True,
            sampling_params=vllm.SamplingParams(max_tokens=3, temperature=0.5, stop=["a"], n=2),
        ),
        vllm.GenerateRequest(text="x", sampling_params=vllm.SamplingParams(logit_bias={3: 1.0})),
    ]),
    ("/vllm.grpc.engine.VllmEngine/Generate", [
        vllm.GenerateRequest(text="x", sampling_params=vllm.SamplingParams(
            max_tokens=4, prompt_logprobs=0, grammar='root ::= "a" | root "b"')),
        vllm.GenerateRequest(text="x", sampling_params=vllm.SamplingParams(
            max_tokens=4, choice=vllm.ChoiceConstraint(choices=["ab", "c"]))),
        vllm.GenerateRequest(text="x", sampling_params=vllm.SamplingParams(
            max_tokens=4, structural_tag=TAGS)),
    ]),
    ("/vllm.grpc.engine.VllmEngine/Abort", [vllm.AbortRequest(request_ids=["nobody"])]),
    ("/vllm.grpc.engine.VllmEngine/GetLoads", [vllm.GetLoadsRequest(dp_rank=1)]),
]  # fmt: skip
ENDLESS = ("/Watch", "/SubscribeKvEvents", "/FlushCache")
ALLOWED = EXPECTED | {
    grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-9, 1e30, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "a", "\0", "\N{PILE OF POO}" * 3, "x" * 300, "<eos>")
INTEGERS = (0, 1, 2, 7, -1, 255, 256, 258, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1)


def vary(message: Message, chance: random.Random, depth: int = 0) -> None:
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.7 or depth > 3:
            continue
        target = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["key"].cpp_type != Field.CPPTYPE_STRING:
                target[chance.choice((0, 1, 5, 257, 2**31 - 1))] = chance.choice(FLOATS)
        elif field.type == Field.TYPE_MESSAGE:
            vary(target.add() if field.is_repeated else target, chance, depth + 1)
            if not field.is_repeated:
                target.SetInParent()
        elif field.is_repeated:
            target.extend(value(field, chance) for _ in range(chance.choice((1, 2, 40))))
        else:
            setattr(message, field.name, value(field, chance))


def value(field: Any, chance: random.Random) -> Any:
    match field.cpp_type:
        case Field.CPPTYPE_FLOAT | Field.CPPTYPE_DOUBLE:
            return chance.choice(FLOATS)
        case Field.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case Field.CPPTYPE_STRING:
            text = chance.choice(TEXTS)
            return text.encode() if field.type == Field.TYPE_BYTES else text
        case Field.CPPTYPE_ENUM:
            return chance.choice((0, 1, 2, 99))
    signed = field.cpp_type in (Field.CPPTYPE_INT32, Field.CPPTYPE_INT64)
    bits = 32 if field.cpp_type in (Field.CPPTYPE_INT32, Field.CPPTYPE_UINT32) else 64
    number = chance.choice(INTEGERS) % 2**bits
    return number - 2**bits if signed and number >= 2 ** (bits - 1) else number


def nonsense(sources: list[Message], chance: random.Random) -> bytes:
    kind = chance.random()
    if kind < 0.1:
        return chance.randbytes(chance.randrange(60))
    message = type(source := chance.choice(sources))()
    message.CopyFrom(source)
    if kind < 0.7:
        vary(message, chance)
        return message.SerializeToString()
    data = bytearray(message.SerializeToString() or b"\0")
    for _ in range(chance.randrange(1, 5)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data[: chance.randrange(len(data) + 1)] if chance.random() < 0.2 else data)


async def attack(channel: grpc.aio.Channel, number: int, seen: Counter[grpc.StatusCode]) -> None:
    chance = random.Random(number)
    method, sources = chance.choice(METHODS)
    data = nonsense(sources, chance)
    try:
        if method.endswith("GenerateMany"):
            call: Any = channel.stream_stream(method, None, None)(iter([data, data]), timeout=30)
        else:
            call = channel.unary_stream(method, None, None)(
                data, timeout=0.1 if method.endswith(ENDLESS) else 30
            )
        async for _ in call:
            pass
        code, details = grpc.StatusCode.OK, ""
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details() or ""
    seen[code] += 1
    assert code in ALLOWED, f"message {number} to {method}: {code} {details}"
    assert "Traceback" not in details
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        assert method.endswith(ENDLESS), f"message {number} to {method} was not answered"
    assert "internal server error" not in details, f"message {number} to {method} was not foreseen"


async def honest(its: Served, stop: asyncio.Event, expected: tuple[int, ...]) -> int:
    count = 0
    while not stop.is_set():
        whole = await collect(its.client.generate(PROMPT, HONEST))
        assert whole[0].token_ids == expected, f"honest request {count} was disturbed"
        count += 1
    return count


async def fuzz(num_messages: int) -> None:
    core = FakeCore(max_model_len=40, verify=False)
    async with served(core, config=small_config(max_pinned_pages=8)) as its, its.channel() as channel:
        expected = (await collect(its.client.generate(PROMPT, HONEST)))[0].token_ids
        stop, seen = asyncio.Event(), Counter[grpc.StatusCode]()
        streams = [asyncio.create_task(honest(its, stop, expected)) for _ in range(3)]
        numbers = iter(range(num_messages))

        async def attacker() -> None:
            for number in numbers:
                await attack(channel, number, seen)

        try:
            await asyncio.gather(*(attacker() for _ in range(16)))
        finally:
            stop.set()
            await asyncio.wait(streams)
        assert all([await stream for stream in streams]), "the honest ones were served all the time"
        for pin in (await its.client.cache.stats()).pins:
            await its.client.cache.unpin(pin.name)
        await eventually(lambda: all_idle(its.engine), "every page idle")
        await eventually(lambda: not any(its.server.held().values()), "nobody holds anything")
        assert core.core is not None
        core.core._blocks.check()
        assert sum(seen.values()) == num_messages
        assert min(seen[code] for code in EXPECTED) > num_messages // 50, f"too much of one kind: {seen}"


async def test_nonsense_harms_no_other_request() -> None:
    await fuzz(1500)
