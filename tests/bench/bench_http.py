"""Cost of HTTP compared with gRPC: one server, equal prompts, alternating calls.

    python tests/bench/bench_http.py --rounds 10 --streams 32

Idle: time to the first token, as the median of paired differences.
Loaded: ratio of the token rates of neighbouring rounds. Rates include the clients' own work.
The last line is JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc.aio
import numpy as np
import psutil

from octavo.engine.client.server_process import ServerProcess
from octavo.proto import generation_pb2 as pb

WORDS = ("baker", "lamp", "river", "stone", "cloud", "letter", "garden", "window", "silver", "harbour")
WARM_UP = 5  # requests of each kind
# (prompt, tokens) -> (seconds to the first token, tokens).
Stream = Callable[[str, int], Awaitable[tuple[float, int]]]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--prompt-words", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=10, help="of each way, loaded")
    parser.add_argument("--requests", type=int, default=60, help="of each way, idle")
    asyncio.run(measure(parser.parse_args(argv)))


async def measure(args: argparse.Namespace) -> None:
    rng = np.random.default_rng(5)

    def prompt() -> str:
        return " ".join(rng.choice(WORDS, args.prompt_words))

    flags = ["--model", args.model, "--num-pages", "1024", "--http", "127.0.0.1:0"]
    async with ServerProcess(flags) as server, grpc.aio.insecure_channel(server.ready["grpc"]) as channel:
        process = psutil.Process(server.pid)
        make = pb.GenerateRequest.SerializeToString
        call = channel.unary_stream("/octavo.v1.Generation/Generate", make, None)
        ways: dict[str, Stream] = {
            "grpc": lambda text, tokens: over_grpc(call, text, tokens),
            "http": lambda text, tokens: over_http(server.ready["http"], text, tokens),
        }
        added = []
        for number in range(args.requests + WARM_UP):
            first = {}
            for way in list(ways)[:: 1 if number % 2 else -1]:
                first[way] = (await ways[way](prompt(), 2))[0]
            if number >= WARM_UP:
                added.append(first["http"] - first["grpc"])
        rates: dict[str, list[float]] = {way: [] for way in ways}
        cpu: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(args.rounds + 1):
            for way in list(ways)[:: 1 if number % 2 else -1]:
                began, used = time.perf_counter(), sum(process.cpu_times()[:2])
                calls = (ways[way](prompt(), args.output_tokens) for _ in range(args.streams))
                done = await asyncio.gather(*calls)
                if number:
                    total = sum(tokens for _, tokens in done)
                    rates[way].append(total / (time.perf_counter() - began))
                    cpu[way].append((sum(process.cpu_times()[:2]) - used) / total * 1e6)
    report(args, added, rates, cpu)


def report(
    args: argparse.Namespace,
    added: list[float],
    rates: dict[str, list[float]],
    cpu: dict[str, list[float]],
) -> None:
    ratios = [http / grpc for http, grpc in zip(rates["http"], rates["grpc"], strict=True)]
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    more_ms = statistics.median(added) * 1e3
    medians = {way: statistics.median(found) for way, found in rates.items()}
    cpu_us = {way: statistics.median(found) for way, found in cpu.items()}
    for way, rate in medians.items():
        print(f"{way}: {rate:.0f} tokens/s at {args.streams} streams, {cpu_us[way]:.0f} us of CPU per token")
    print(
        f"HTTP: first token {more_ms:+.2f} ms, {middle:.3f} of gRPC's rate (quartiles {low:.3f}, {high:.3f})"
    )
    result = {
        "bench": "http", "model": args.model, "streams": args.streams, "rounds": args.rounds,
        "added_ttft_ms": more_ms, "tokens_per_s": medians, "ratio": middle, "ratio_quartiles": [low, high],
        "server_cpu_us_per_token": cpu_us,
    }  # fmt: skip
    print(json.dumps(result))


async def over_grpc(call: Any, text: str, tokens: int) -> tuple[float, int]:
    request = pb.GenerateRequest(text=text)
    request.sampling.max_tokens, request.sampling.ignore_eos = tokens, True
    began, first, last = time.perf_counter(), 0.0, b""
    async for message in call(request):
        last = message
        first = first or time.perf_counter() - began
    return first, pb.GenerateResponse.FromString(last).usage.generated_tokens


async def over_http(address: str, text: str, tokens: int) -> tuple[float, int]:
    body = {
        "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = json.dumps(body).encode()
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    began, first, tail = time.perf_counter(), 0.0, b""
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)
    )
    while piece := await reader.read(2**16):
        tail = tail[-1000:] + piece
        if not first and b"data: {" in tail:
            first = time.perf_counter() - began
    writer.close()
    usage = tail.rpartition(b'"usage":')[2].partition(b"\n")[0]
    return first, int(json.loads(usage[: usage.rindex(b"}")])["completion_tokens"])


if __name__ == "__main__":
    main(sys.argv[1:])
