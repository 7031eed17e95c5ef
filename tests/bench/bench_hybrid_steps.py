"""Processor time of a decode step of a model with recurrent layers.

    python tests/bench/bench_hybrid_steps.py MODEL [--sequences 1,8,32] [--rounds 5]
    OPENBLAS_NUM_THREADS=1 python tests/bench/bench_hybrid_steps.py MODEL --floor

Steps run captured and uncaptured in turn; each figure is the median time of 16 tokens.
``--floor`` compares captured steps with the time to read the weights and the states from memory."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from octavo.engine import LLM
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor.load import load
from octavo.engine.executor.load.loader import observe_caches
from octavo.engine.executor.load.prepare import make_ready
from octavo.kernels.cpu.recurrent import zeros

SHORT, LONG = 5, 21  # tokens


def seconds(llm: LLM, sequences: int, tokens: int) -> float:
    """Return CPU seconds of all threads of the process, for new prompts of 32 tokens."""
    prompts = np.random.default_rng().integers(0, 256, (sequences, 32)).tolist()
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    began = time.process_time()
    llm.generate(prompts, params, progress=False)
    return time.process_time() - began


def read_rate(memory: Any) -> float:
    """Return bytes per CPU second that a dot product reads from an array larger than the caches."""
    began = time.process_time()
    np.dot(memory, memory)
    return float(memory.nbytes / (time.process_time() - began))


def compare_with_floor(settings: dict[str, Any], counts: list[int], rounds: int) -> None:
    memory = np.asarray(zeros((1 << 26,), mx.float32))
    memory[:] = 1
    folder = Path(settings["model"])
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    states = 2 * observe_caches(folder).slot_bytes
    with LLM(EngineConfig(**settings)) as llm:
        for sequences in counts:
            times, rates = [], []
            for _ in range(rounds):
                short, long = (seconds(llm, sequences, tokens) for tokens in (SHORT, LONG))
                times.append((long - short) / (LONG - SHORT))
                rates += [read_rate(memory) for _ in range(5)]
            step, rate = statistics.median(times), statistics.median(rates)
            num_bytes = weights + sequences * states
            floor = num_bytes / rate
            print(
                f"{sequences} sequences: {1e3 * step:.1f} ms a step; {num_bytes / 1e9:.3f} GB "
                f"at {rate / 1e9:.1f} GB/s take {1e3 * floor:.1f} ms: {step / floor:.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--floor", action="store_true")
    args = parser.parse_args()
    counts = [int(count) for count in args.sequences.split(",")]
    settings: dict[str, Any] = {
        "model": args.model,
        "threads": 1,
        "max_model_len": 512,
        "prefix_cache": False,
    }
    if args.floor:
        compare_with_floor(settings, counts, args.rounds)
        return
    vars(load)["make_ready"] = functools.partial(make_ready, fuse=False)
    separate = LLM(EngineConfig(**settings))
    vars(load)["make_ready"] = make_ready
    with separate, LLM(EngineConfig(**settings)) as recorded:
        for sequences in counts:
            times: dict[str, list[float]] = {"module by module": [], "recorded": []}
            for _ in range(args.rounds):
                for (_, found), llm in zip(times.items(), (separate, recorded), strict=True):
                    short, long = (seconds(llm, sequences, tokens) for tokens in (SHORT, LONG))
                    found.append((long - short) / (LONG - SHORT))
            a, b = (statistics.median(found) for found in times.values())
            print(
                f"{sequences} sequences: {1e3 * a:.2f} ms a step module by module, {1e3 * b:.2f} recorded "
                f"and fused: {a / b:.1f} times",
                flush=True,
            )


if __name__ == "__main__":
    main()
