"""Microseconds that drafting takes per sequence and step, with long contexts.

    python tests/bench/bench_drafting.py [--context 32768] [--steps 2000]

The first proposal indexes the prompt, so it is printed separately. Times are CPU times of the thread."""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from octavo.engine.speculation.ngram_index import NgramIndex, TextIndex
from octavo.engine.speculation.recent_outputs import RECENT_TOKENS, RecentOutputs
from octavo.engine.speculation.suffix import NgramDrafter, SuffixDrafter


def texts(context: int, steps: int) -> dict[str, list[int]]:
    rng = np.random.default_rng(1)
    fresh: list[int] = rng.integers(0, 150_000, context + steps).tolist()
    copied = fresh[:context]
    while len(copied) < context + steps:
        start = int(rng.integers(0, context - 60))
        copied += [*rng.integers(0, 150_000, 2).tolist(), *fresh[start : start + int(rng.integers(10, 60))]]
    return {
        "copied": copied[: context + steps],
        "chance": rng.integers(0, 6, context + steps).tolist(),
        "fresh": fresh,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    print("text     drafter   index, ms   median   mean   p99, us")
    for name, text in texts(args.context, args.steps).items():
        recent = RecentOutputs()
        for start in range(0, RECENT_TOKENS, 512):
            recent.add(text[start : start + 512])
        drafters = (
            NgramDrafter(TextIndex(NgramIndex(), args.context)),
            SuffixDrafter(TextIndex(NgramIndex(), args.context), recent),
        )
        for drafter in drafters:
            tokens, taken = text[: args.context], []
            began = time.thread_time()
            drafter.propose(tokens, 8)
            index_ms = 1e3 * (time.thread_time() - began)
            for token in text[args.context :]:
                tokens.append(token)
                began = time.thread_time()
                drafter.propose(tokens, 8)
                taken.append(1e6 * (time.thread_time() - began))
            kind = type(drafter).__name__.removesuffix("Drafter").lower()
            print(
                f"{name:8s} {kind:8s} {index_ms:9.1f} {statistics.median(taken):9.1f} "
                f"{statistics.mean(taken):6.1f} {np.percentile(taken, 99):7.1f}"
            )


if __name__ == "__main__":
    main()
