"""What a latency target does for those who decode: gaps between tokens while long prompts arrive.

    python tests/bench/bench_target_itl.py --model q06-4 --target-itl 150 --rounds 3

Some streams decode; prompts arrive one after the other, the next when the last has its first token. Rounds
alternate without and with the target, on cores of their own. Reported are the gaps between tokens of the
streams (ms), and the tokens of streams and prompts together per second. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.core.request import Request

WARM_UP_STEPS = 20


@dataclass(slots=True)
class Round:
    """Gaps in seconds; tokens of prompts and streams in so many seconds."""

    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0

    def quantile(self, q: float) -> float:
        """Milliseconds."""
        return sorted(self.gaps)[min(len(self.gaps) - 1, int(q * len(self.gaps)))] * 1e3


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kv-format", default="fp4")
    parser.add_argument("--target-itl", type=_target, default=150.0, help="milliseconds, or auto")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    rounds: dict[str, list[Round]] = {"without": [], "with": []}
    for number in range(args.rounds):
        rounds["without"].append(_round(args, "off", seed=number))
        rounds["with"].append(_round(args, args.target_itl, seed=number))
    result = {
        "bench": "target_itl",
        "target_ms": args.target_itl,
        **{n: _figures(r) for n, r in rounds.items()},
    }
    for name, figures in result.items():
        if isinstance(figures, dict):
            print(name, {key: [round(value, 1) for value in values] for key, values in figures.items()})
    print(json.dumps(result))


def _target(text: str) -> float | Literal["auto"]:
    return "auto" if text == "auto" else float(text)


def _figures(rounds: list[Round]) -> dict[str, list[float]]:
    return {
        "p50_ms": [each.quantile(0.5) for each in rounds],
        "p99_ms": [each.quantile(0.99) for each in rounds],
        "max_ms": [max(each.gaps) * 1e3 for each in rounds],
        "tokens_per_s": [each.num_tokens / each.seconds for each in rounds],
    }


def _round(args: argparse.Namespace, target: float | Literal["auto", "off"], *, seed: int) -> Round:
    config = EngineConfig(
        model=args.model,
        kv_format=args.kv_format,
        num_pages=(args.streams + 2) * 4096 // 32,
        prefix_cache=False,
        target_itl=target,
    )
    core = build_core(config)
    try:
        return _measure(core, args, np.random.default_rng(seed))
    finally:
        core.finish()
        core.close()


def _measure(core: EngineCore, args: argparse.Namespace, rng: np.random.Generator) -> Round:
    streams = {_add(core, rng, 64, 4000) for _ in range(args.streams)}
    for _ in range(WARM_UP_STEPS):
        core.step()
    found, last, prompt = Round(), dict.fromkeys(streams, time.monotonic()), None
    began = time.monotonic()
    while time.monotonic() - began < args.seconds:
        if prompt is None:
            prompt = _add(core, rng, args.prompt_tokens, 1)
        for update in core.step():
            now = time.monotonic()
            if update.request in streams:
                found.gaps.append(now - last[update.request])
                last[update.request] = now
                found.num_tokens += 1
            elif update.request is prompt:
                found.num_tokens += args.prompt_tokens
                prompt = None
    found.seconds = time.monotonic() - began
    return found


def _add(core: EngineCore, rng: np.random.Generator, num_tokens: int, max_tokens: int) -> Request:
    request = Request(
        f"{rng.integers(2**40)}",
        rng.integers(0, core.info.vocab_size, num_tokens).tolist(),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        max_tokens=max_tokens,
        tokenizer=core.tokenizer,
        vocab_size=core.info.vocab_size,
        arrived_at=time.monotonic(),
    )
    core.add(request)
    return request


if __name__ == "__main__":
    main(sys.argv[1:])
