"""``octavo bench serve``: latencies and rates as a client sees them, over real gRPC.

Prompts are seeded random token ids, so that nothing is shared but what is asked for; outputs
run to their full length. Percentiles are of the requests that succeeded; inter-token times are
per token (a response with k tokens counts k times, each with a k-th of the gap).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from octavo.engine.bench.plots import picture, require_matplotlib
from octavo.engine.cli.options import add_engine_arguments, engine_flags, given_settings
from octavo.engine.cli.usage import positive
from octavo.engine.client import Client
from octavo.engine.errors import InvalidConfig, InvalidRequest, OctavoError, RequestFailed
from octavo.engine.params import SamplingParams
from octavo.engine.server.address import parse_address
from octavo.engine.server.process import ServerProcess

PERCENTILES = (50, 95, 99)
DEFAULT_CONCURRENCY = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--connect", metavar="HOST:PORT", help="measure the server there instead of starting one")
    add("--requests", type=positive, default=32, metavar="N", help="how many requests to send")
    add("--concurrency", type=positive, metavar="N",
        help=f"requests in flight at most ({DEFAULT_CONCURRENCY}; with --rate: no limit)")  # fmt: skip
    add("--rate", type=_rate, metavar="R", help="send R requests per second on average (Poisson arrivals)")
    add("--prompt-tokens", type=positive, default=256, metavar="N", help="tokens of each prompt")
    add("--output-tokens", type=positive, default=64, metavar="N", help="tokens to generate for each")
    add("--shared-prefix-tokens", type=int, default=0, metavar="N",
        help="how many of a prompt's first tokens all prompts share")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals")
    add("--plot", type=Path, metavar="F.png", help="draw the distributions (needs matplotlib)")
    add_engine_arguments(parser)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of requests per second above 0, got {text!r}")
    return value


@dataclass(slots=True)
class Trace:
    """One request as the client saw it; times in seconds since it was sent."""

    ttft_s: float = 0.0
    e2e_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    num_generated: int = 0
    cached_tokens: int = 0
    error: str | None = None


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark, print a table, return what ``--json`` prints."""
    _check(args)
    traces, wall_s = asyncio.run(_measure(args))
    good = [trace for trace in traces if trace.error is None]
    for trace in traces:
        if trace.error is not None:
            print(f"failed: {trace.error}", file=sys.stderr)
    if not good:
        raise RequestFailed(f"all {len(traces)} requests failed; the first: {traces[0].error}")
    result = summarize(good, wall_s, num_requests=len(traces), prompt_tokens=args.prompt_tokens)
    _print_table(result)
    if args.plot is not None:
        _plot(good, args.plot)
    return result


def _check(args: argparse.Namespace) -> None:
    if not 0 <= args.shared_prefix_tokens <= args.prompt_tokens:
        raise InvalidRequest(
            f"--shared-prefix-tokens must be between 0 and --prompt-tokens ({args.prompt_tokens}), "
            f"got {args.shared_prefix_tokens}"
        )
    if args.connect is not None and (settings := given_settings(args)):
        raise InvalidConfig(f"{engine_flags(settings)[0]} is the server's to choose; drop it or --connect")
    require_matplotlib(args.plot)


async def _measure(args: argparse.Namespace) -> tuple[list[Trace], float]:
    async with _address(args) as address, Client(address) as client:
        vocab_size = (await client.model_info()).vocab_size
        rng = np.random.default_rng(args.seed)
        # Two more than are measured: they warm the server up, with prompts nobody else has.
        prompts = make_prompts(
            rng,
            args.requests + 2,
            args.prompt_tokens,
            shared=args.shared_prefix_tokens,
            vocab_size=vocab_size,
        )
        for prompt in prompts[:2]:
            await _request(client, [*reversed(prompt)], min(args.output_tokens, 4))
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
    """Of the server to measure; one of our own runs as long as this is open."""
    if args.connect is not None:
        yield str(parse_address(args.connect))
        return
    async with ServerProcess(engine_flags(given_settings(args))) as server:
        yield server.ready["grpc"]


async def _request(client: Client, prompt: list[int], num_tokens: int) -> Trace:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    trace, sent = Trace(), time.monotonic()
    last: float | None = None
    try:
        async for delta in client.generate(prompt, params):
            now, count = time.monotonic(), len(delta.token_ids)
            if count and last is None:
                trace.ttft_s = now - sent
            elif count and last is not None:
                trace.itl_s += [(now - last) / count] * count
            last = now if count else last
            trace.num_generated += count
            trace.cached_tokens = delta.cached_tokens
            trace.error = trace.error or delta.error
    except OctavoError as error:
        trace.error = str(error)
    trace.e2e_s = time.monotonic() - sent
    return trace


def make_prompts(
    rng: np.random.Generator, count: int, num_tokens: int, *, shared: int, vocab_size: int
) -> list[list[int]]:
    """``count`` prompts of random ids, equal in their first ``shared`` tokens."""
    prefix = rng.integers(0, vocab_size, shared).tolist()
    return [prefix + rng.integers(0, vocab_size, num_tokens - shared).tolist() for _ in range(count)]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99; zeros when there are no values."""
    points = np.percentile(values, PERCENTILES).tolist() if values else [0.0] * len(PERCENTILES)
    return {f"p{percent}": point for percent, point in zip(PERCENTILES, points, strict=True)}


def summarize(
    good: Sequence[Trace], wall_s: float, *, num_requests: int, prompt_tokens: int
) -> dict[str, Any]:
    """The benchmark's JSON."""
    generated = sum(trace.num_generated for trace in good)
    return {
        "bench": "serve",
        "requests": num_requests,
        "failed": num_requests - len(good),
        "wall_s": wall_s,
        "output_tokens_per_s": generated / wall_s,
        "total_tokens_per_s": (generated + prompt_tokens * len(good)) / wall_s,
        "ttft_s": percentiles([trace.ttft_s for trace in good]),
        "itl_s": percentiles([gap for trace in good for gap in trace.itl_s]),
        "e2e_s": percentiles([trace.e2e_s for trace in good]),
        "cached_tokens": sum(trace.cached_tokens for trace in good),
    }


def _print_table(result: dict[str, Any]) -> None:
    print(
        f"{result['requests']} requests, {result['failed']} failed, in {result['wall_s']:.2f} s: "
        f"{result['output_tokens_per_s']:.1f} output tokens/s, {result['total_tokens_per_s']:.1f} in all, "
        f"{result['cached_tokens']} prompt tokens from the cache"
    )
    print(f"{'':24}{'p50':>10}{'p95':>10}{'p99':>10}")
    for key, name in (
        ("ttft_s", "time to first token"),
        ("itl_s", "between tokens"),
        ("e2e_s", "whole request"),
    ):
        cells = "".join(f"{1000 * value:>7.1f} ms" for value in result[key].values())
        print(f"{name:24}{cells}")


def _plot(good: Sequence[Trace], path: Path) -> None:
    """Cumulative distributions of the three latencies."""
    series = {
        "time to first token": [trace.ttft_s for trace in good],
        "between tokens": [gap for trace in good for gap in trace.itl_s],
        "whole request": [trace.e2e_s for trace in good],
    }
    with picture(path, columns=3, share_y=True) as axes:
        for axis, (name, values) in zip(axes, series.items(), strict=True):
            axis.plot(np.sort(values), np.linspace(0, 1, len(values)))
            axis.set(title=name, xlabel="seconds")
        axes[0].set_ylabel("share of all")
