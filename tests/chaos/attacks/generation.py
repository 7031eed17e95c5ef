"""Requests for output that are too many, too large, contradictory, cancelled or never read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from typing import Any

import grpc.aio

from octavo.proto import cache_pb2
from octavo.proto import generation_pb2 as pb

from ..attack import Seen, Target, attack, cancel_later, count, count_all, repeat, request_of

VOCABULARY = 1536


@attack("many-samples", "slots")
async def take_every_slot(target: Target, seen: Seen) -> None:
    """Send requests with 64 samples, which take every running slot."""

    async def call(stub: Any, rng: random.Random, left: float) -> None:
        request = request_of("again " * 20, max_tokens=1000, n=64, seed=rng.getrandbits(32), ignore_eos=True)
        await count(seen, stub.Generate(request, metadata=target.metadata, timeout=left))

    await repeat(target, 3, call)


@attack("slow-readers", "C1")
async def read_nothing(target: Target, seen: Seen) -> None:
    async def never_read() -> None:
        async with target.generation() as stub:
            request = request_of(max_tokens=1200, logprobs=20, ignore_eos=True, temperature=1.0)
            call = stub.Generate(request, metadata=target.metadata)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.wait_for_connection()
            await asyncio.sleep(target.seconds)
            seen[(await call.code()).name if call.done() else "held to the end"] += 1
            call.cancel()

    await asyncio.gather(*(never_read() for _ in range(24)))


@attack("rapid-resets", "C2")
async def reset_streams(target: Target, seen: Seen) -> None:
    """Open thousands of streams and reset them at once."""
    request, at_once = request_of("reset " * 50, max_tokens=8), 1500
    async with target.generation() as stub:
        for _ in range(3):
            calls = [stub.Generate(request, metadata=target.metadata) for _ in range(at_once)]
            await asyncio.sleep(0)
            for call in calls[: at_once // 2]:
                call.cancel()
            await asyncio.sleep(0.05)
            for call in calls:
                call.cancel()
            await count_all(seen, calls)


@attack("queue-flood", "B2, C2, C3")
async def flood_the_queue(target: Target, seen: Seen) -> None:
    """Send more requests of one tenant than may wait; other tenants' requests are not refused."""
    words = "tell me about everything that ever was, and then about the rest, please. " * 100
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=words)])
    request = pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(max_tokens=4))
    async with target.generation() as stub:
        options: dict[str, Any] = {"metadata": target.metadata, "timeout": 2 * target.seconds}
        await count_all(seen, [stub.Generate(request, **options) for _ in range(1500)])


@attack("cancelled-requests", "G")
async def cancel_at_random(target: Target, seen: Seen) -> None:
    async def call(stub: Any, cache: Any, rng: random.Random, *_: Any) -> None:
        words = "again and again " * rng.randrange(1, 400)
        kind = rng.randrange(6)
        if kind == 0:
            call = stub.Tokenize(pb.TokenizeRequest(text=words), metadata=target.metadata)
        elif kind == 1:
            call = cache.GetStats(cache_pb2.GetStatsRequest(), metadata=target.metadata)
        else:
            request = request_of(
                words,
                max_tokens=400,
                n=rng.choice((1, 1, 4)),
                logprobs=rng.choice((None, 5)),
                structured=pb.Structured(json_object=True) if kind == 2 else None,
                prompt_logprobs=1 if kind == 3 else None,
            )
            deadline = rng.choice((None, 0.02))
            call = stub.Generate(request, metadata=target.metadata, timeout=deadline)
        cancel_later(call, rng.random() * 0.1)
        await count(seen, call)

    await repeat(target, 6, call, Target.generation, Target.cache)


@attack("contradictory", "E2, E5")
async def contradict(target: Target, seen: Seen) -> None:
    """Send parameters that contradict each other or have a wrong type."""
    tag = {"type": "structural_tag", "triggers": ["<f"], "structures": [{"begin": 1, "schema": {}, "end": 2}]}
    requests = [
        request_of(max_tokens=4, **fields)
        for fields in (
            {"repetition_penalty": 1e-39},
            {"min_tokens": 4, "stop_ids": range(VOCABULARY)},
            {"logit_bias": dict.fromkeys(range(VOCABULARY), -1e30)},
            {"temperature": 1e-30, "logit_bias": {5: 1e30}},
            {"structured": pb.Structured(structural_tag=json.dumps(tag))},
            {"structured": pb.Structured(structural_tag="[]")},
            {"structured": pb.Structured(json_schema='{"type": 7}')},
            {},
        )
    ]
    requests[-1].request_id = "a line\nand another: error"
    async with target.generation() as stub:
        for request in requests * 10:
            await count(seen, stub.Generate(request, metadata=target.metadata, timeout=20))


@attack("saves", "A4", setup="tiny")
async def save(target: Target, seen: Seen) -> None:
    """Save cached prompts as an operator while others fill a small pool."""
    options: dict[str, Any] = {"metadata": target.operator_metadata, "timeout": 20}

    def request_with(step: int, stride: int) -> pb.GenerateRequest:
        ids = pb.TokenIds(ids=[(number * step + at * stride) % 1400 + 3 for at in range(600)])
        return pb.GenerateRequest(token_ids=ids, sampling=pb.SamplingParams(max_tokens=2))

    end, number = time.monotonic() + target.seconds, 0
    async with target.generation() as stub, target.cache() as cache:
        while time.monotonic() < end:
            number += 1
            first, second = request_with(31, 7), request_with(37, 11)
            await count(seen, stub.Generate(first, **options))
            prompt = cache_pb2.Prefix(token_ids=first.token_ids)
            saved = cache_pb2.SaveRequest(path=f"{number}.safetensors", prompt=prompt)
            await count_all(seen, [cache.Save(saved, **options), stub.Generate(second, **options)])


@attack("prompt-scores", "y07")
async def score_prompts(target: Target, seen: Seen) -> None:
    """Ask for log probabilities of long prompts, with all alternatives and many samples."""
    words = "all of this is scored, word by word. " * 60
    requests = [request_of(words, max_tokens=2, prompt_logprobs=20, n=samples) for samples in (1, 8, 32)]

    async def call(stub: Any, *_: Any) -> None:
        calls = [stub.Generate(request, metadata=target.metadata, timeout=20) for request in requests]
        await count_all(seen, calls)

    await repeat(target, 1, call)


@attack("resumed-states", "state slots", setup="recurrent")
@attack("states-on-disk", "state slots", setup="recurrent-disk")
async def cancel_recurrent(target: Target, seen: Seen) -> None:
    """Ask for long outputs of a recurrent model in a small pool, and cancel them at random."""

    async def call(stub: Any, rng: random.Random, *_: Any) -> None:
        request = request_of(
            f"story {rng.randrange(5)} " * rng.randrange(5, 60),
            max_tokens=rng.randrange(20, 300),
            n=rng.choice((1, 1, 2)),
            ignore_eos=True,
        )
        call = stub.Generate(request, metadata=target.metadata, timeout=20)
        if rng.random() < 0.5:
            cancel_later(call, rng.random() * 2)
        await count(seen, call)

    await repeat(target, 12, call)
