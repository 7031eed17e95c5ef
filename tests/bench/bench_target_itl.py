"""Gaps between tokens of decoding streams while long prompts arrive, with and without a latency target.

    python tests/bench/bench_target_itl.py --model q06-4 --target-itl 150 --fixed 64,256 --rates 0.1,0.2

``--fixed``: also with fixed chunks. ``--clock cpu``: a second is CPU time divided by the kernel threads.
``--rates``: prompts also arrive at random. A request is good if its first token comes within
``--good-ttft`` and no gap exceeds 1.3 times the target. The last line is JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np

from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.stats import StepRecord
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.core.request import Request

Number = TypeVar("Number", int, float)

CLOCKS = ("wall", "cpu")
WARM_UP_STEPS = 20
WARM_UP_S = 5.0
GOOD_GAP = 1.3  # longest good gap, as a multiple of the target
DEFAULT_TARGET_MS = 150.0


class Tokens:
    def __init__(self) -> None:
        self.prompts = self.streams = 0

    def step(self, record: StepRecord) -> None:
        self.prompts += record.prefill_tokens
        self.streams += record.decode_tokens

    def rejected(self, reason: str) -> None:
        raise AssertionError(f"nothing is submitted here that could be refused, but: {reason}")


@dataclass(slots=True)
class Round:
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    seconds: float = 0.0

    def quantile(self, q: float) -> float:
        return sorted(self.gaps)[min(len(self.gaps) - 1, int(q * len(self.gaps)))] * 1e3


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kv-format", default="fp4")
    parser.add_argument("--target-itl", type=_target, default=DEFAULT_TARGET_MS, help="milliseconds, or auto")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a round, by the clock")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--threads", type=int, default=2, help="of the kernels, for --clock cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fixed", type=_numbers(int), default=[], metavar="N,N", help="tokens of chunks")
    parser.add_argument(
        "--rates", type=_numbers(float), default=[], metavar="R,R", help="requests per second"
    )
    parser.add_argument("--output-tokens", type=int, default=48, help="of each request, with --rates")
    parser.add_argument("--good-ttft", type=float, default=10.0, help="seconds, with --rates")
    args = parser.parse_args(argv)
    configs: dict[str, tuple[float | Literal["auto", "off"], int]] = {
        "without": ("off", 512),
        "with": (args.target_itl, 512),
        **{f"chunks of {tokens}": ("off", tokens) for tokens in args.fixed},
    }
    rounds: dict[str, list[Round]] = {name: [] for name in configs}
    goodput: dict[str, dict[str, float]] = {name: {} for name in configs}
    for number in range(args.rounds):
        for name, (target, step_tokens) in configs.items():
            with _core(args, target, step_tokens) as (core, counts):
                rounds[name].append(_measure(core, counts, args, np.random.default_rng(number)))
    for name, (target, step_tokens) in configs.items() if args.rates else ():
        with _core(args, target, step_tokens) as (core, counts):
            # Warm-up: the target learns step times.
            _measure(core, counts, args, np.random.default_rng(0), seconds=WARM_UP_S)
            for rate in args.rates:
                goodput[name][f"{rate:g}"] = _goodput(core, args, rate, has_target=target != "off")
    result = {
        "bench": "target_itl",
        "clock": args.clock,
        "target_ms": args.target_itl,
        **{n: _figures(r) for n, r in rounds.items()},
        "goodput_per_s": goodput,
    }
    for name, figures in result.items():
        if isinstance(figures, dict) and name != "goodput_per_s":
            print(name, {key: [round(value, 1) for value in values] for key, values in figures.items()})
    for name, rates in goodput.items():
        print(f"goodput, {name}:", {rate: round(value, 3) for rate, value in rates.items()})
    print(json.dumps(result))


def _target(text: str) -> float | Literal["auto"]:
    return "auto" if text == "auto" else float(text)


def _numbers(kind: Callable[[str], Number]) -> Callable[[str], list[Number]]:
    return lambda text: [kind(part) for part in text.split(",")]


def _figures(rounds: list[Round]) -> dict[str, list[float]]:
    return {
        "p50_ms": [each.quantile(0.5) for each in rounds],
        "p99_ms": [each.quantile(0.99) for each in rounds],
        "max_ms": [max(each.gaps) * 1e3 for each in rounds],
        "tokens_per_s": [each.num_tokens / each.seconds for each in rounds],
        "prompt_tokens_per_s": [each.num_prompt_tokens / each.seconds for each in rounds],
    }


@contextlib.contextmanager
def _core(
    args: argparse.Namespace, target: float | Literal["auto", "off"], step_tokens: int
) -> Iterator[tuple[EngineCore, Tokens]]:
    counts = Tokens()
    core = build_core(
        EngineConfig(
            model=args.model,
            kv_format=args.kv_format,
            num_pages=(args.streams + 8) * 4096 // 32,
            max_running=min(32, step_tokens),
            max_step_tokens=step_tokens,
            prefix_cache=False,
            target_itl=target,
        ),
        counts,
        _clock(args),
    )
    try:
        yield core, counts
    finally:
        core.finish()
        core.close()


def _clock(args: argparse.Namespace) -> Callable[[], float]:
    return time.monotonic if args.clock == "wall" else lambda: time.process_time() / args.threads


def _measure(
    core: EngineCore,
    counts: Tokens,
    args: argparse.Namespace,
    rng: np.random.Generator,
    seconds: float | None = None,
) -> Round:
    clock = _clock(args)
    streams = {_add(core, rng, 64, 4000) for _ in range(args.streams)}
    for _ in range(WARM_UP_STEPS):
        core.step()
    found, last, prompt = Round(), dict.fromkeys(streams, clock()), None
    began, prompts_before, streams_before = clock(), counts.prompts, counts.streams
    while clock() - began < (seconds or args.seconds):
        if prompt is None:
            prompt = _add(core, rng, args.prompt_tokens, 1)
        for update in core.step():
            now = clock()
            if update.request in streams:
                found.gaps.append(now - last[update.request])
                last[update.request] = now
            elif update.request is prompt:
                prompt = None
    found.seconds = clock() - began
    found.num_prompt_tokens = counts.prompts - prompts_before
    found.num_tokens = found.num_prompt_tokens + counts.streams - streams_before
    for request in (*streams, *([prompt] if prompt else ())):
        core.abort(request)
    return found


def _goodput(core: EngineCore, args: argparse.Namespace, rate: float, *, has_target: bool) -> float:
    """Return requests per second within the targets, with arrivals at this rate."""
    rng = np.random.default_rng(7)
    arrivals = np.cumsum(rng.exponential(1 / rate, size=max(1, round(rate * args.seconds)))).tolist()
    first: dict[Request, float] = {}  # seconds until the first token
    last: dict[Request, float] = {}
    worst: dict[Request, float] = {}
    sent: dict[Request, float] = {}
    began, limit = time.monotonic(), arrivals[-1] + args.good_ttft + args.seconds
    while (now := time.monotonic() - began) < limit and (len(sent) < len(arrivals) or core.has_work):
        while len(sent) < len(arrivals) and arrivals[len(sent)] <= now:
            request = _add(
                core,
                rng,
                args.prompt_tokens,
                args.output_tokens,
                target_ttft=args.good_ttft * 1e3 if has_target else None,
            )
            sent[request] = arrivals[len(sent)]
        if not core.has_work:
            time.sleep(max(0.0, arrivals[len(sent)] - now))
            continue
        updates, now = core.step(), time.monotonic() - began
        for request in {update.request for update in updates} & sent.keys():
            first.setdefault(request, now - sent[request])
            worst[request] = max(worst.get(request, 0.0), now - last.get(request, now))
            last[request] = now
    for request in sent:
        core.abort(request)
    target_s = (DEFAULT_TARGET_MS if args.target_itl == "auto" else args.target_itl) / 1e3
    good = sum(first[each] <= args.good_ttft and worst[each] <= GOOD_GAP * target_s for each in first)
    return float(rate * good / len(arrivals))


def _add(
    core: EngineCore,
    rng: np.random.Generator,
    num_tokens: int,
    max_tokens: int,
    *,
    target_ttft: float | None = None,
) -> Request:
    request = Request(
        f"{rng.integers(2**40)}",
        rng.integers(0, core.info.vocab_size, num_tokens).tolist(),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, target_ttft=target_ttft),
        max_tokens=max_tokens,
        tokenizer=core.tokenizer,
        vocab_size=core.info.vocab_size,
        arrived_at=time.monotonic(),
    )
    core.add(request)
    return request


if __name__ == "__main__":
    main(sys.argv[1:])
