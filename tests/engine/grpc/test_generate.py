from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import grpc.aio
import pytest

import octavo
from draft_checks import Cores
from engines import Gate, SlowSteps
from fakes import VOCAB_SIZE, FakeCore, byte_tokenizer, small_config
from ledger_runner import EOS
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.prompt import Prompt
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.grpc.octavo_v1 import messages
from octavo.proto import generation_pb2 as pb
from scripted import TEMPLATE
from served import Served, collect, served

pytestmark = pytest.mark.server

CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "prompt", ["hello there", [104, 101, 108, 108, 111], CHAT], ids=["text", "ids", "chat"]
)
async def test_over_the_wire_equals_in_process(prompt: Prompt) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=7, n=3, logprobs=0)
    async with served() as its:
        there = await collect(its.client.generate(prompt, params, request_id="same"))
        here = await collect(its.engine.generate(prompt, params, request_id="same"))
    assert sorted(there) == [0, 1, 2]
    for index, delta in there.items():
        assert delta.token_ids == here[index].token_ids
        assert delta.text == here[index].text
        assert delta.logprobs == here[index].logprobs
        assert delta.finish_reason is FinishReason.LENGTH
    assert len({delta.token_ids for delta in there.values()}) > 1, "samples have seeds of their own"


async def test_a_stream_brings_tokens_as_they_come_and_counts_them() -> None:
    async with served(gate=(gate := Gate())) as its:
        request = pb.GenerateRequest(request_id="r", text="hello", sampling=pb.SamplingParams(max_tokens=12))
        stream, responses = aiter(its.client.stub.Generate(request)), []
        for _ in range(3):
            gate.allow(1)
            responses.append(await anext(stream))
            assert len(responses[-1].token_ids) == 1
        gate.open()
        responses += [response async for response in stream]
    assert {response.request_id for response in responses} == {"r"}
    running = 0
    for response in responses:
        running += len(response.token_ids)
        assert response.usage.generated_tokens == running
        assert response.usage.prompt_tokens == 5
    assert running == 12
    assert [r.finish_reason for r in responses[:-1]] == [pb.FINISH_REASON_UNSPECIFIED] * (len(responses) - 1)
    assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parity
@pytest.mark.parametrize("drafts", ["off", "suffix"])
async def test_a_continued_request_has_the_bits_of_the_unbroken_one(drafts: str) -> None:
    config = EngineConfig(num_pages=64, page_size=8, max_running=4, max_step_tokens=64, speculate=drafts)
    prompt, num_tokens = list(range(60, 79)), 20

    async def told(its: Served, earlier: list[int], **fields: Any) -> tuple[Any, ...]:
        sampling = pb.SamplingParams(
            max_tokens=40, min_tokens=num_tokens, temperature=1.1, seed=7, presence_penalty=0.6,
            frequency_penalty=0.5, repetition_penalty=1.3, logprobs=2, logit_bias=dict.fromkeys(ends, 100.0),
            **fields,
        )  # fmt: skip
        ids = pb.TokenIds(ids=[*prompt, *earlier])
        request = pb.GenerateRequest(token_ids=ids, sampling=sampling)
        found = [response async for response in its.client.stub.Generate(request)]
        scores = [score.SerializeToString(deterministic=True) for each in found for score in each.logprobs]
        tokens = [token for each in found for token in each.token_ids]
        return tokens, scores, "".join(each.text for each in found), found[-1].finish_reason

    core: Any = Cores()
    async with served(core, config=config) as its:
        ends = list((await its.client.model_info()).eos_token_ids)
        tokens, scores, text, reason = await told(its, [])
        assert len(set(tokens)) > 8
        assert (len(tokens), len(scores), reason) == (num_tokens + 1, num_tokens + 1, pb.FINISH_REASON_STOP)
        for cut in (1, 8, 19):
            rest = await told(its, tokens[:cut], num_output_tokens=cut)
            assert rest[:2] == (tokens[cut:], scores[cut:])
            assert rest[3] == reason
            assert text.endswith(rest[2])
            assert await told(its, tokens[:cut]) != rest


async def test_final_mode_gives_one_response_per_sample() -> None:
    request = pb.GenerateRequest(
        text="hello", sampling=pb.SamplingParams(max_tokens=12, n=2), output_mode=pb.OUTPUT_MODE_FINAL
    )
    async with served(gate=SlowSteps()) as its:
        responses = [response async for response in its.client.stub.Generate(request)]
        alone = await collect(its.client.generate("hello", SamplingParams(max_tokens=12)))
    assert sorted(response.index for response in responses) == [0, 1]
    for response in responses:
        assert tuple(response.token_ids) == alone[0].token_ids
        assert response.text == alone[0].text
        assert response.usage.generated_tokens == 12
        assert response.finish_reason == pb.FINISH_REASON_LENGTH
        assert response.request_id


async def test_the_output_names_its_stop_reason() -> None:
    async with served(FakeCore(ends_every=5)) as its:
        by_string = await collect(its.client.generate("x", SamplingParams(stop=("b",), ignore_eos=True)))
        by_id = await collect(its.client.generate("x", SamplingParams(stop_ids=(ord("c"),), ignore_eos=True)))
        by_end = await collect(its.client.generate("x", SamplingParams()))
    assert by_string[0].stop_match == "b"
    assert "b" not in by_string[0].text
    assert by_string[0].finish_reason is FinishReason.STOP
    assert by_id[0].stop_match == ord("c") == by_id[0].token_ids[-1]
    assert by_end[0].stop_match == EOS == by_end[0].token_ids[-1]


async def test_a_repeated_prompt_says_how_much_was_cached_and_a_salt_keeps_it_apart() -> None:
    prompt, params = list(range(50, 70)), SamplingParams(max_tokens=2)
    async with served() as its:
        cold = await collect(its.client.generate(prompt, params))
        warm = await collect(its.client.generate(prompt, params))
        other = await collect(its.client.generate(prompt, params, salt="tenant"))
        own = await collect(its.client.generate(prompt, params, salt="tenant"))
    assert [whole[0].cached_tokens for whole in (cold, warm, other, own)] == [0, 16, 0, 16]


async def test_tokenize_and_detokenize() -> None:
    tokenizer = byte_tokenizer()
    async with served() as its:
        assert await its.client.tokenize("héllo") == tokenizer.encode("héllo")
        assert await its.client.detokenize(tokenizer.encode("héllo")) == "héllo"
        assert await its.client.detokenize([]) == ""
        messages = [pb.ChatMessage(role=each["role"], content=each["content"]) for each in CHAT]
        chat = pb.Chat(messages=messages)
        reply = await its.client.stub.Tokenize(pb.TokenizeRequest(chat=chat))
    assert list(reply.token_ids) == tokenizer.apply_chat_template(CHAT)


async def test_abort_ends_the_stream_normally() -> None:
    async with served(gate=(gate := Gate())) as its:
        deltas = its.client.generate("hello", SamplingParams(), request_id="long")
        gate.allow(1)
        first = await anext(deltas)
        assert first.finish_reason is None
        assert await its.client.abort("unknown", "long") == ["long"]
        gate.open()
        rest = await collect(deltas)
        assert rest[0].finish_reason is FinishReason.ABORT
        assert await its.client.abort("long") == []


async def test_model_and_server_info() -> None:
    async with served() as its:
        model = await its.client.model_info()
        before = await its.client.server_info()
        await asyncio.sleep(0.01)
        after = await its.client.server_info()
    assert (model.name, model.vocab_size, model.page_size, model.num_pages) == ("fake", VOCAB_SIZE, 4, 64)
    assert list(model.eos_token_ids) == [EOS]
    assert before.version == octavo.__version__
    assert not before.draining
    assert before.pages.idle_empty == 64
    assert after.uptime_seconds > before.uptime_seconds


async def test_a_chat_takes_tools_parts_and_names_of_the_template() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = json.dumps({"type": "function", "function": {"name": "now", "parameters": schema}})
    messages = [
        pb.ChatMessage(role="user", parts=[pb.ContentPart(text="H"), pb.ContentPart(text="i")]),
        pb.ChatMessage(role="assistant", tool_calls=['{"function": {"name": "now", "arguments": "{}"}}']),
        pb.ChatMessage(role="tool", content="noon", tool_call_id="c1"),
    ]
    chat = pb.Chat(messages=messages, tools=[tool], template_variables='{"enable_thinking": false}')
    core = FakeCore(tokenizer=byte_tokenizer(template=TEMPLATE))
    async with served(core, config=small_config(num_pages=512)) as its:
        ids = (await its.client.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
        text = bytes(ids).decode()
        assert '"name": "now"' in text.partition("</tools>")[0]
        assert "<user>Hi\n<assistant><tool_call>\n" in text
        assert text.endswith("<tool>noon\n<assistant><think>\n\n</think>\n\n")
        chat.tool_choice = "now"
        request = pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(max_tokens=200))
        said = "".join([response.text async for response in its.client.stub.Generate(request)])
        assert json.loads(said.partition("<tool_call>")[2].partition("</tool_call>")[0])["name"] == "now"
        chat.tools.append("[]")
        with pytest.raises(grpc.aio.AioRpcError, match=r"chat.tools\[1\] must be a JSON object"):
            await its.client.stub.Tokenize(pb.TokenizeRequest(chat=chat))


def test_tool_choice_is_refused_without_generation() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")], tool_choice="none")
    with pytest.raises(InvalidRequest, match=r"chat\.tool_choice"):
        messages.prompt_of(pb.EmbedRequest(chat=chat))
