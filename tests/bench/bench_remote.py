"""Compare reading a prompt's pages from a remote cache with computing them.

    python tests/bench/bench_remote.py [--url redis://HOST] [--tokens 64,256,1024] [--repeats 15]

One output token per prompt, by turns: computed without a remote cache, read from it, and asked for in vain.
Without --url, a Redis server on this machine is started. The last line is JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from octavo.engine import LLM, EngineConfig, SamplingParams
from octavo.engine.arguments.usage import counts
from page_stores import RedisServer

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


def answer(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    began = time.perf_counter()
    (output,) = llm.generate([prompt], ONE_TOKEN, progress=False)
    return (time.perf_counter() - began) * 1e3, output.cached_tokens


def measure(config: dict[str, Any], url: str, lengths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    work: list[Any] = [
        (length, *([rng.randrange(3, 250) for _ in range(length)] for _ in range(2)))
        for length in lengths
        for _ in range(repeats)
    ]
    shared = EngineConfig(**config, remote_cache=url)
    with LLM(shared) as writer:
        for _, stored, _ in work:
            answer(writer, stored)
    found: dict[int, list[list[float]]] = {length: [[], [], []] for length in lengths}
    with LLM(EngineConfig(**config)) as alone, LLM(shared) as reader:
        for length, stored, unknown in work:
            computed, _ = answer(alone, stored)
            read, cached = answer(reader, stored)
            in_vain, missing = answer(reader, unknown)
            assert cached > missing == 0
            for times, milliseconds in zip(found[length], (computed, read, in_vain), strict=True):
                times.append(milliseconds)
    return [
        {"tokens": str(length)}
        | {
            name: [round(float(np.percentile(times, percent)), 2) for percent in (10, 50)]
            for name, times in zip(("computed", "read", "in_vain"), found[length], strict=True)
        }
        for length in lengths
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--url", default="")
    parser.add_argument("--tokens", type=counts, default=(64, 128, 256, 512, 1024, 2048))
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    config = {"model": args.model, "threads": 1, "num_pages": 4096, "speculate": "off", "target_itl": "off"}
    with contextlib.ExitStack() as stack:
        if not args.url:
            server = RedisServer(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            stack.callback(server.close)
            server.start()
            server.wait()
        rows = measure(config, args.url or server.url, args.tokens, args.repeats)
    for row in rows:
        print(row)
    print(json.dumps({"percentiles": [10, 50], "unit": "ms", "rows": rows}))


if __name__ == "__main__":
    main()
