"""Measure gaps between tokens of one engine while long prompts arrive; the last line is JSON.

    python tests/bench/peers/compare_itl.py octavo --model q06-4 --target-itl 150
    python tests/bench/peers/compare_itl.py vllm --model q06-w4a16
    python tests/bench/peers/compare_itl.py vllm --model q06-w4a16 --batched-tokens 128

Reported per round: p50, p99 and maximum of the gaps (ms), prompt and generated tokens per second.
README.md in this folder says how to make environments and models."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import sys
import time
from typing import Protocol

from compare import ENGINES
from workload import VOCABULARY, Engine

STREAM_PROMPT = 64
WARM_UP_STEPS = 20


class StreamEngine(Engine, Protocol):
    latest: list[int]

    def submit(self, prompt: list[int], max_tokens: int) -> int: ...


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("engine", choices=("octavo", "vllm"))
    add("--model", required=True, help="folder, in the engine's format")
    add("--kv-format", help="octavo: of the KV cache (fp4)")
    add("--weights", default="keep", help="that octavo loads them as: keep, int8, w8a8, int4")
    add("--dtype", default="bfloat16", help="that vllm computes in")
    add("--eager", action="store_true", help="vllm: without compiled graphs")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--target-itl", default="off", help="octavo: milliseconds, auto, or off")
    add("--step-tokens", type=int, default=512, help="octavo: tokens computed in one step at most")
    add("--batched-tokens", type=int, help="vllm: max_num_batched_tokens (its own default)")
    add("--streams", type=int, default=8)
    add("--prompt-tokens", type=int, default=2000)
    add("--seconds", type=float, default=20.0, help="of a round, at least")
    add("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.target_itl not in ("auto", "off"):
        args.target_itl = float(args.target_itl)
    args.sequences = args.streams + 1
    args.context = args.prompt_tokens + 512
    return args


def measure(engine: StreamEngine, args: argparse.Namespace, draw: random.Random) -> dict[str, float]:
    def prompt(length: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(length)]

    most = args.context - STREAM_PROMPT - 1
    streams = {engine.submit(prompt(STREAM_PROMPT), most) for _ in range(args.streams)}
    for _ in range(WARM_UP_STEPS):
        engine.step()
    began = now = time.perf_counter()
    last = dict.fromkeys(streams, began)
    gaps: list[float] = []
    num_prompts = num_tokens = 0
    under_way = engine.submit(prompt(args.prompt_tokens), 1)
    while True:
        num_tokens += engine.step()
        now = time.perf_counter()
        for request in engine.latest:
            if request in streams:
                gaps.append(now - last[request])
                last[request] = now
        if under_way in engine.latest:
            num_prompts += 1
            if now - began >= args.seconds:
                break
            under_way = engine.submit(prompt(args.prompt_tokens), 1)
    engine.clear()
    if max(now - at for at in last.values()) > max(gaps):
        sys.exit("a stream ended before its round: fewer --seconds, or longer --prompt-tokens")
    gaps.sort()
    seconds = now - began
    return {
        "p50_ms": gaps[len(gaps) // 2] * 1e3,
        "p99_ms": gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))] * 1e3,
        "max_ms": gaps[-1] * 1e3,
        "prompt_tokens_per_s": num_prompts * args.prompt_tokens / seconds,
        "output_tokens_per_s": num_tokens / seconds,
        "tokens_per_s": (num_prompts * args.prompt_tokens + num_tokens) / seconds,
        "seconds": seconds,
    }


def main() -> None:
    args = arguments()
    package = ENGINES[args.engine]
    if importlib.util.find_spec(package) is None:
        print(f"skipped: {args.engine} needs the package {package}, which {sys.executable} does not have")
        return
    engine: StreamEngine = importlib.import_module(f"engine_{args.engine}").load(args)
    draw = random.Random(1)
    warm = argparse.Namespace(**{**vars(args), "seconds": 0.0})
    measure(engine, warm, draw)  # warm-up: compiles the shapes of steps
    rounds = [measure(engine, args, draw) for _ in range(args.rounds)]
    print(f"{engine.name}: {engine.settings}")
    for figures in rounds:
        print("  " + ", ".join(f"{name} {value:.1f}" for name, value in figures.items()))
    print(
        json.dumps(
            {"bench": "peers_itl", "engine": engine.name, "settings": engine.settings, "rounds": rounds}
        )
    )


if __name__ == "__main__":
    main()
