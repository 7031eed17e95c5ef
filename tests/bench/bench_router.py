"""Measure the CPU time of the SMG router per request, prompt token, output token and idle worker.

    python tests/bench/bench_router.py [--workers 1,2,4] [--requests 200] [--runs 3]

Workers serve the demo model. Every prompt is new, so its page events are part of a prompt token's cost. The
last line is JSON with all runs."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass

import psutil

from octavo.engine.arguments.usage import counts
from octavo.engine.client.router_process import RouterProcess
from octavo.engine.client.server_process import ServerProcess
from octavo_lab.bench.route import Question, ask

FLAGS = ["--model", "demo", "--threads", "1", "--num-pages", "512", "--speculate", "off"]
IDLE_S = 10.0
FEW_WORDS, MANY_WORDS, MANY_TOKENS = 16, 512, 65
numbers = itertools.count()


@dataclass(frozen=True)
class Cost:
    cpu_s: float
    prompt_tokens: float
    output_tokens: float


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def send(router: RouterProcess, requests: int, words: int, max_tokens: int) -> Cost:
    url = f"http://{router.listen}"
    questions = [Question(f"{next(numbers)} " + "a sea " * (words // 2), max_tokens) for _ in range(requests)]
    with ThreadPoolExecutor(4) as pool:
        before = cpu_s(router.pid)
        answers = list(pool.map(lambda question: ask(url, "demo", question), questions))
        spent = cpu_s(router.pid) - before
    return Cost(
        spent / requests,
        sum(answer.prompt_tokens for answer in answers) / requests,
        sum(answer.output_tokens for answer in answers) / requests,
    )


def measure(router: RouterProcess, requests: int) -> dict[str, float]:
    send(router, requests, FEW_WORDS, 1)
    short, long = send(router, requests, FEW_WORDS, 1), send(router, requests, MANY_WORDS, 1)
    streamed = send(router, requests, FEW_WORDS, MANY_TOKENS)
    prompt_token = (long.cpu_s - short.cpu_s) / (long.prompt_tokens - short.prompt_tokens)
    output_token = (streamed.cpu_s - short.cpu_s) / (streamed.output_tokens - short.output_tokens)
    before = cpu_s(router.pid)
    time.sleep(IDLE_S)
    return {
        "request_us": 1e6 * (short.cpu_s - prompt_token * short.prompt_tokens - output_token),
        "prompt_token_us": 1e6 * prompt_token,
        "output_token_us": 1e6 * output_token,
        "idle_us_per_s": 1e6 * (cpu_s(router.pid) - before) / IDLE_S,
    }


async def main(args: argparse.Namespace) -> None:
    found = []
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(ServerProcess(FLAGS)) for _ in range(max(args.workers))]
        addresses = [worker.ready["grpc"] for worker in workers]
        for run, count in itertools.product(range(args.runs), args.workers):
            async with RouterProcess(addresses[:count]) as router:
                await router.until_ready(["demo"])
                costs = await asyncio.to_thread(measure, router, args.requests)
            found.append({"run": run, "workers": count, **costs})
            print(", ".join(f"{name} {value:.1f}" for name, value in found[-1].items()), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=counts, default=(1, 2, 4))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    asyncio.run(main(parser.parse_args()))
