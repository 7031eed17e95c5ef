"""Cost of the server: the same streams over gRPC and in the engine's core alone.

    python tests/bench/bench_server_overhead.py --model demo --streams 64 --rounds 5

Rounds alternate. Reported: median token rates, their ratio, and CPU time of the serving process.
The last line is JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.engine.api.address import Address
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.cli.serve import settle_interpreter
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.core.request import Request
from octavo.engine.frontend.async_engine import AsyncEngine
from octavo.engine.grpc.server import GrpcServer


@dataclass(frozen=True, slots=True)
class Round:
    wall_s: float
    cpu_s: float
    loop_cpu_s: float = 0.0


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kv-format", default="bf16")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(measure(parser.parse_args(argv)))


async def measure(args: argparse.Namespace) -> None:
    config = EngineConfig(
        model=args.model,
        kv_format=args.kv_format,
        num_pages=args.streams * (-(-(args.prompt_tokens + args.output_tokens) // 32) + 1),
        max_running=args.streams,
        prefix_cache=False,
    )
    core = build_core(config)
    engine = AsyncEngine(config)
    await engine.start()
    server = GrpcServer(engine)
    address = await server.start(Address("127.0.0.1", 0))
    settle_interpreter()
    try:
        core_rounds, server_rounds = [], []
        for number in range(args.rounds + 1):
            alone = core_round(core, args, number)
            served = await server_round(str(address), args, number)
            if number:
                core_rounds.append(alone)
                server_rounds.append(served)
    finally:
        await server.stop()
        core.close()
    report(args, core_rounds, server_rounds)


def core_round(core: EngineCore, args: argparse.Namespace, seed: int) -> Round:
    rng = np.random.default_rng(seed)
    wall, cpu = time.perf_counter(), time.process_time()
    for index in range(args.streams):
        prompt = rng.integers(0, core.info.vocab_size, args.prompt_tokens).tolist()
        core.add(
            Request(
                f"alone/{index}",
                prompt,
                SamplingParams(max_tokens=args.output_tokens, ignore_eos=True),
                max_tokens=args.output_tokens,
                tokenizer=core.tokenizer,
                vocab_size=core.info.vocab_size,
                arrived_at=time.monotonic(),
            )
        )
    while core.has_work:
        for update in core.step():
            assert update.delta.finish_reason is not FinishReason.ERROR, update.delta.error
    return Round(time.perf_counter() - wall, time.process_time() - cpu)


async def server_round(address: str, args: argparse.Namespace, seed: int) -> Round:
    counts = {"requests": args.streams, "concurrency": args.streams, "seed": seed}
    lengths = {"prompt-tokens": args.prompt_tokens, "output-tokens": args.output_tokens}
    flags = [word for name, value in (counts | lengths).items() for word in (f"--{name}", str(value))]
    cpu, loop_cpu = time.process_time(), time.thread_time()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "octavo.engine.cli", "bench", "serve", "--connect", address, *flags, "--json",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0, f"the client ended with {process.returncode}"
    result = json.loads(output.splitlines()[-1])
    assert not result["failed"], result
    return Round(result["wall_s"], time.process_time() - cpu, time.thread_time() - loop_cpu)


def report(args: argparse.Namespace, alone: list[Round], served: list[Round]) -> None:
    tokens = args.streams * args.output_tokens
    rates = {
        name: tokens / statistics.median(item.wall_s for item in rounds)
        for name, rounds in (("engine", alone), ("server", served))
    }
    walls = [a.wall_s / b.wall_s for a, b in zip(alone, served, strict=True)]
    cpus = [b.cpu_s / a.cpu_s for a, b in zip(alone, served, strict=True)]
    for name, rate in rates.items():
        print(f"{name:8}{rate:>10.0f} output tokens/s")
    throughput, cpu = statistics.median(walls), statistics.median(cpus)
    print(
        f"the server's throughput is {throughput:.3f} of the engine's ({min(walls):.3f} to {max(walls):.3f}),"
    )
    print(f"its process's CPU time {cpu:.3f} of the engine's ({min(cpus):.3f} to {max(cpus):.3f}):")
    own = statistics.median(item.cpu_s for item in alone) / tokens
    loop = statistics.median(item.loop_cpu_s for item in served) / tokens
    print(f"CPU time per token: engine {1e6 * own:.0f} us, the server's event loop {1e6 * loop:.0f} us")
    summary = {"model": args.model, "streams": args.streams, "tokens_per_s": rates}
    ratios = {"throughput_ratio": throughput, "cpu_ratio": cpu, "loop_cpu_s_per_token": loop}
    print(json.dumps(summary | ratios))


if __name__ == "__main__":
    main(sys.argv[1:])
