"""Processor time of a decode step of a model with recurrent layers, with and without recorded steps.

    python tests/bench/bench_hybrid_steps.py MODEL [--sequences 1,8,32] [--rounds 5]

Both ways take turns; each figure is the median over the rounds of what 16 more tokens take. Of a model of
little width (``make_model.py --hybrid --hidden 64 --linear-heads 2 --linear-head-dim 32``) it is what a step
costs besides its weights and states.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from octavo.engine import LLM
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams

SHORT, LONG = 5, 21  # tokens


def seconds(llm: LLM, sequences: int, tokens: int) -> float:
    """Of all threads of the process, for new prompts of 32 tokens."""
    prompts = np.random.default_rng().integers(0, 256, (sequences, 32)).tolist()
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    began = time.process_time()
    llm.generate(prompts, params, progress=False)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    settings: dict[str, Any] = {
        "model": args.model,
        "threads": 1,
        "max_model_len": 512,
        "prefix_cache": False,
    }
    with (
        LLM(EngineConfig(**settings, fuse=False)) as separate,
        LLM(EngineConfig(**settings)) as recorded,
    ):
        for sequences in map(int, args.sequences.split(",")):
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
