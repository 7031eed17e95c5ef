"""Speed of native sampling for all rows of a step, with a large vocabulary.

    python tests/bench/bench_sampling.py [--threads N] [--rows 32] [--vocab 151936] [--types bf16,fp32]

Milliseconds for all rows, median and minimum, by kind of request. The last line is JSON."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import mlx.core as mx
import numpy as np

from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor.sampling.native_sampling import NativeSampler
from octavo.engine.executor.sampling.sampler import SampleState
from octavo.kernels import _ext

TYPES = {"bf16": mx.bfloat16, "fp16": mx.float16, "fp32": mx.float32}
TOP_P: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-p": TOP_P,
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "presence penalty, top-p": {**TOP_P, "presence_penalty": 0.5},
    "repetition penalty, top-p": {**TOP_P, "repetition_penalty": 1.1},
    "every penalty, top-p": {
        **TOP_P,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
    },
    "logit bias, top-p": {**TOP_P, "logit_bias": {5: 1.0}},
    "5 log probabilities, greedy": {"temperature": 0.0, "logprobs": 5},
    "5 log probabilities, top-p": {**TOP_P, "logprobs": 5},
    "20 log probabilities, penalty": {**TOP_P, "repetition_penalty": 1.1, "logprobs": 20},
}
NUM_PROMPT, NUM_GENERATED = 500, 300
SPREAD = 1.2  # standard deviation of a random model's logits


def states(params: SamplingParams, rows: int, vocab: int) -> list[SampleState]:
    rng = np.random.default_rng(1)
    made = []
    for seed in range(rows):
        prompt = rng.integers(0, vocab, NUM_PROMPT).tolist()
        state = SampleState(params, seed=seed, prompt_ids=prompt, vocab_size=vocab)
        for token in rng.integers(0, vocab, NUM_GENERATED).tolist():
            state.record(token)
        made.append(state)
    return made


def measure(logits: mx.array, drawing: list[SampleState], repeats: int) -> list[float]:
    sample, rows, times = NativeSampler().draw, range(len(drawing)), []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        sample(logits, rows, drawing)
        times.append(1e3 * (time.perf_counter() - start))
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=_ext.threads())
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--types", default="bf16,fp32")
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    _ext.set_threads(args.threads)
    noise = np.random.default_rng(0).standard_normal((args.rows, args.vocab)).astype(np.float32)
    print(f"{_ext.isa()}, {args.threads} threads; {args.rows} rows of {args.vocab} logits, milliseconds")
    results = []
    for kind, settings in KINDS.items():
        if args.only not in kind:
            continue
        drawing = states(SamplingParams(**settings), args.rows, args.vocab)
        for name in args.types.split(","):
            logits = mx.array(noise * np.float32(SPREAD)).astype(TYPES[name])
            mx.eval(logits)
            times = measure(logits, drawing, args.repeats)
            figures = {"median_ms": statistics.median(times), "least_ms": min(times)}
            results.append({"kind": kind, "type": name, **figures})
            print(
                f"{kind:30} {name} {figures['median_ms']:7.2f} (least {figures['least_ms']:.2f})", flush=True
            )
    summary = {"bench": "sampling", "isa": _ext.isa(), "threads": args.threads, "rows": args.rows}
    print(json.dumps({**summary, "vocab": args.vocab, "results": results}))


if __name__ == "__main__":
    main()
