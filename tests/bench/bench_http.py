"""What HTTP costs: `octavo serve --http` beside a router started by hand, and beside gRPC alone.

    python tests/bench/bench_http.py --rounds 10 --streams 16          (extra `http`)

One worker, three ways to it: gRPC, the router that its server supervises, and one that this program starts
with no more than an address. Idle: one completion of a new prompt at a time, by each way in turn; what a
router adds to the time to the first token is the median of the differences to gRPC's next to it. Loaded: as
many streams at once by either router, in turns; the rates' ratio is the median over neighbouring rounds.
What other programs take of the machine, neighbours lose alike, in the long run: on a busy one the routers'
own CPU time per token says more than the clock. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import socket
import statistics
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from octavo.engine.api.errors import EngineDead
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.client.client import Client
from octavo.engine.client.server_process import ServerProcess

READY_S = 60.0
WORDS = ("baker", "lamp", "river", "stone", "cloud", "letter", "garden", "window", "silver", "harbour")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--prompt-words", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=10, help="of each router, loaded")
    parser.add_argument("--requests", type=int, default=60, help="of each way, idle")
    asyncio.run(measure(parser.parse_args(argv)))


async def measure(args: argparse.Namespace) -> None:
    rng = np.random.default_rng(5)

    def prompt() -> str:
        return " ".join(rng.choice(WORDS, args.prompt_words))

    flags = ["--model", args.model, "--num-pages", "1024", "--http", "127.0.0.1:0"]
    async with (
        ServerProcess(flags) as server,
        router_by_hand(server.ready["grpc"], server.ready["model"]) as (other, its_pid),
        Client(server.ready["grpc"]) as grpc,
    ):
        name = server.ready["model"]
        ways = {"supervised": server.ready["http"], "by hand": other}
        (child,) = (p for p in psutil.Process(server.pid).children() if "smg" in p.name())
        processes = {"supervised": child, "by hand": psutil.Process(its_pid)}
        added: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(args.requests + 5):
            direct = await first_token_grpc(grpc, prompt())
            for way in list(ways)[:: 1 if number % 2 else -1]:
                ttft = (await stream(ways[way], name, prompt(), 2))[0]
                if number >= 5:  # the first ones warm all three up
                    added[way].append(ttft - direct)
        rates: dict[str, list[float]] = {way: [] for way in ways}
        before = {way: cpu_s(process) for way, process in processes.items()}
        for number in range(args.rounds + 1):
            for way in list(ways)[:: 1 if number % 2 else -1]:
                rate = await loaded(ways[way], name, [prompt() for _ in range(args.streams)], args)
                if number:
                    rates[way].append(rate)
        tokens = (args.rounds + 1) * args.streams * args.output_tokens
        costs = {way: (cpu_s(processes[way]) - before[way]) / tokens * 1e6 for way in ways}
    report(args, added, rates, costs)


def report(
    args: argparse.Namespace,
    added: dict[str, list[float]],
    rates: dict[str, list[float]],
    costs: dict[str, float],
) -> None:
    medians = {way: statistics.median(times) * 1e3 for way, times in added.items()}
    ratios = [ours / theirs for ours, theirs in zip(rates["supervised"], rates["by hand"], strict=True)]
    for way, found in rates.items():
        rate = statistics.median(found)
        print(
            f"{way}: {medians[way]:.2f} ms to the first token beyond gRPC, {rate:.0f} tokens/s, "
            f"{costs[way]:.1f} us of its CPU time a token"
        )
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    print(
        f"supervised over by hand: {middle:.3f} of the tokens per second (quartiles {low:.3f} to {high:.3f})"
    )
    result = {
        "bench": "http", "model": args.model, "streams": args.streams, "rounds": args.rounds,
        "added_ttft_ms": medians,
        "tokens_per_s": {way: statistics.median(found) for way, found in rates.items()},
        "router_cpu_us_per_token": costs, "ratio": middle, "ratio_quartiles": [low, high],
    }  # fmt: skip
    print(json.dumps(result))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def first_token_grpc(client: Client, text: str) -> float:
    """Seconds until the first token, without HTTP."""
    began, first = time.perf_counter(), 0.0
    async for _ in client.generate(text, SamplingParams(max_tokens=2, ignore_eos=True)):
        first = first or time.perf_counter() - began
    return first


async def stream(address: str, model: str, text: str, tokens: int) -> tuple[float, int]:
    """Seconds until the first event of one completion, and its tokens. By hand: a client library's own time
    would be the server's."""
    body = json.dumps({
        "model": model, "prompt": text, "max_tokens": tokens, "temperature": 0, "stream": True,
        "ignore_eos": True, "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    host, port = address.rsplit(":", 1)
    began, first, usage = time.perf_counter(), 0.0, None
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    async for line in reader:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - began
            if b'"usage":{' in line:
                usage = json.loads(line[6:])["usage"]
    writer.close()
    if usage is None or usage["completion_tokens"] != tokens:
        raise RuntimeError(f"a stream of {tokens} tokens ended with {usage}")
    return first, tokens


async def loaded(address: str, model: str, prompts: Sequence[str], args: argparse.Namespace) -> float:
    """Tokens per second of all prompts at once."""
    began = time.perf_counter()
    done = await asyncio.gather(*(stream(address, model, text, args.output_tokens) for text in prompts))
    return sum(tokens for _, tokens in done) / (time.perf_counter() - began)


@asynccontextmanager
async def router_by_hand(worker: str, model: str) -> AsyncIterator[tuple[str, int]]:
    """Where another router serves the same worker, with its own defaults, and its process."""
    beside = str(Path(sys.executable).parent)
    program = shutil.which("smg", path=beside) or shutil.which("smg")
    if program is None:
        raise SystemExit("bench_http: the router is not installed; run: pip install 'octavo[router]'")
    port, metrics = free_port(), free_port()
    process = await asyncio.create_subprocess_exec(
        program, "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics),
        "--prometheus-host", "127.0.0.1", "--log-level", "error", "--worker-urls", f"grpc://{worker}",
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await until_it_names(f"http://127.0.0.1:{port}", model, process)
        yield f"127.0.0.1:{port}", process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def until_it_names(base: str, model: str, process: Any) -> None:
    def serves() -> bool:
        with contextlib.suppress(OSError, ValueError, KeyError):
            models = json.load(urllib.request.urlopen(f"{base}/v1/models", timeout=5))["data"]
            tokenizers = json.load(urllib.request.urlopen(f"{base}/v1/tokenizers", timeout=5))["tokenizers"]
            return any(m["id"] == model for m in models) and any(t["name"] == model for t in tokenizers)
        return False

    until = time.monotonic() + READY_S
    while time.monotonic() < until and process.returncode is None:
        if await asyncio.to_thread(serves):
            return
        await asyncio.sleep(0.1)
    raise EngineDead("the router started by hand does not serve")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main(sys.argv[1:])
