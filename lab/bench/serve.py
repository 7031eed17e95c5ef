"""``octavo bench serve``: latencies and rates as a client sees them, over gRPC.

Prompts are random token ids. Percentiles count successful requests only. Inter-token times are measured
between messages; a message with several tokens counts once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections import ChainMap, Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from octavo.engine.api.address import parse_address
from octavo.engine.api.errors import InvalidConfig, InvalidRequest, OctavoError, RequestFailed
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.arguments.options import add_engine_arguments, engine_flags, given_settings
from octavo.engine.arguments.security import add_connection_arguments, credentials_of
from octavo.engine.arguments.usage import positive, whole_number
from octavo.engine.client.client import Client
from octavo.engine.client.server_process import ServerProcess
from octavo.engine.client.token_times import TokenTimes

from ..plots.figure import require_matplotlib
from .latencies import (
    Slo,
    Trace,
    draw_latencies,
    print_table,
    slo_limits,
    summarize,
)

DEFAULT_CONCURRENCY = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--connect", metavar="HOST:PORT", help="gRPC address of a server to measure, instead of starting one")
    add("--requests", type=positive, default=32, metavar="N", help="number of requests to send")
    add("--concurrency", type=positive, metavar="N", help="maximum number of requests in flight (default: "
        f"{DEFAULT_CONCURRENCY}, or no limit with --rate)")  # fmt: skip
    add("--rate", type=_rate, metavar="R", help="send R requests per second on average (Poisson arrivals)")
    add("--prompt-tokens", type=positive, default=256, metavar="N", help="number of tokens of each prompt")
    add("--output-tokens", type=positive, default=64, metavar="N",
        help="number of tokens to generate per prompt")  # fmt: skip
    add("--shared-prefix-tokens", type=whole_number, default=0, metavar="N",
        help="number of tokens at the start that all prompts share")  # fmt: skip
    add("--slo", "--goodput", dest="slo", type=slo_limits, nargs="+", metavar="NAME:MS,...",
        help="count requests within these limits in ms: ttft (first token), tpot (mean per later token), itl "
        "(longest gap), e2el (whole request)")  # fmt: skip
    add("--seed", type=whole_number, default=0, metavar="N", help="seed of prompts and arrival times")
    add("--plot", type=Path, metavar="F.png", help="image file for a plot of the distributions (needs "
        "matplotlib)")  # fmt: skip
    add_connection_arguments(parser)
    add_engine_arguments(parser)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of requests per second above 0, got {text!r}")
    return value


def run(args: argparse.Namespace) -> dict[str, Any]:
    _check(args)
    traces, wall_s = asyncio.run(_measure(args))
    good = [trace for trace in traces if trace.error is None]
    if not good:
        raise RequestFailed(f"all {len(traces)} requests failed; the first: {traces[0].error}")
    for error, count in Counter(trace.error for trace in traces if trace.error is not None).items():
        print(f"failed, {count} of {len(traces)}: {error}", file=sys.stderr)
    result = summarize(
        good,
        wall_s,
        num_requests=len(traces),
        prompt_tokens=args.prompt_tokens,
        slo=Slo(dict(ChainMap(*args.slo))) if args.slo else None,
    )
    print_table(result)
    if args.plot is not None:
        draw_latencies(good, args.plot)
    return result


def _check(args: argparse.Namespace) -> None:
    if not 0 <= args.shared_prefix_tokens <= args.prompt_tokens:
        raise InvalidRequest(
            f"--shared-prefix-tokens must be between 0 and --prompt-tokens ({args.prompt_tokens}), "
            f"got {args.shared_prefix_tokens}"
        )
    if args.connect is not None and (settings := given_settings(args)):
        raise InvalidConfig(f"{engine_flags(settings)[0]} is a setting of the server; drop it or --connect")
    credentials_of(args)  # raises if they are given without --connect
    require_matplotlib(args.plot)


async def _measure(args: argparse.Namespace) -> tuple[list[Trace], float]:
    async with _address(args) as address, Client(address, credentials=credentials_of(args)) as client:
        model = await client.model_info()
        if (length := args.prompt_tokens + args.output_tokens) > model.max_model_len:
            raise InvalidRequest(
                f"--prompt-tokens and --output-tokens are {length} together, but the server's model has a "
                f"length of {model.max_model_len}; lower one of them"
            )
        rng = np.random.default_rng(args.seed)
        # Two additional prompts warm the server up; no other request shares them.
        prompts = make_prompts(
            rng,
            args.requests + 2,
            args.prompt_tokens,
            shared=args.shared_prefix_tokens,
            vocab_size=model.vocab_size,
        )
        for prompt in prompts[:2]:
            await _request(client, [*reversed(prompt)], min(args.output_tokens, 4))
        gc.collect()
        gc.freeze()  # pauses of this process's garbage collector would be measured as the server's
        arrivals = np.cumsum(rng.exponential(1 / args.rate, args.requests)) if args.rate else None
        unlimited = args.requests if args.rate else DEFAULT_CONCURRENCY
        slots = asyncio.Semaphore(args.concurrency or unlimited)
        progress = tqdm(total=args.requests, unit="request", disable=None, file=sys.stderr)
        began = time.monotonic()

        async def send(index: int, prompt: list[int]) -> Trace:
            if arrivals is not None:
                await asyncio.sleep(arrivals[index] - (time.monotonic() - began))
            async with slots:
                trace = await _request(client, prompt, args.output_tokens)
            progress.update()
            return trace

        with progress:
            traces = await asyncio.gather(*(send(i, prompt) for i, prompt in enumerate(prompts[2:])))
        return traces, time.monotonic() - began


@asynccontextmanager
async def _address(args: argparse.Namespace) -> AsyncIterator[str]:
    if args.connect is not None:
        yield str(parse_address(args.connect))
        return
    async with ServerProcess(engine_flags(given_settings(args))) as server:
        yield server.ready["grpc"]


async def _request(client: Client, prompt: list[int], num_tokens: int) -> Trace:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    trace = Trace(TokenTimes(time.monotonic()))
    try:
        async for delta in client.generate(prompt, params):
            trace.times.add(time.monotonic(), len(delta.token_ids))
            trace.cached_tokens = delta.cached_tokens
            trace.error = trace.error or delta.error
    except OctavoError as error:
        trace.error = str(error)
    trace.e2e_s = time.monotonic() - trace.times.began
    return trace


def make_prompts(
    rng: np.random.Generator, count: int, num_tokens: int, *, shared: int, vocab_size: int
) -> list[list[int]]:
    """Return ``count`` prompts of random token ids whose first ``shared`` tokens are equal."""
    prefix = rng.integers(0, vocab_size, shared).tolist()
    return [prefix + rng.integers(0, vocab_size, num_tokens - shared).tolist() for _ in range(count)]
