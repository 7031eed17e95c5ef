"""``octavo bench scheduler``: cost of scheduling decisions, without a model.

The benchmark times plan and commit per step while N sequences decode. It also times the block manager for a
long prompt with nothing or everything cached.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.block_manager import BlockManager
from octavo.engine.arguments.usage import counts, positive
from octavo.scheduler import Limits, SampleResult, Scheduler, Sequence
from octavo.scheduler.waiting import WaitingQueue

PAGE_SIZE = 32
NUM_PROMPT = 200
PROMPT_TOKENS = 32_768
VOCABULARY = 150_000
WARM_UP = 8  # steps
NUM_TENANTS = 100
TARGET_ITL_S = 0.15
SIMULATED_STEP_S = 0.05  # duration of each step, in seconds, as told to the scheduler
SEED = 1
PROMPT_POOL = 2 * PROMPT_TOKENS // PAGE_SIZE  # pages
_FILL = 3


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """Seconds of each repetition: ``cold`` for a new prompt, ``warm`` for the same prompt again."""

    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, float]:
        return {
            "prompt_cold_us": statistics.median(self.cold) * 1e6,
            "prompt_warm_us": statistics.median(self.warm) * 1e6,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=counts, default=(1, 64, 256, 1024), metavar="N,N",
        help="numbers of sequences in a step")  # fmt: skip
    parser.add_argument("--steps", type=positive, default=256, metavar="N", help="number of steps to time")
    parser.add_argument("--repeats", type=positive, default=20, metavar="N", help="number of prompts to time")


def run(args: argparse.Namespace) -> dict[str, Any]:
    step_us = {str(num): time_steps(num, args.steps) for num in args.sequences}
    shared_us = {str(num): time_steps(num, args.steps, shared=True) for num in args.sequences}
    result = {
        "bench": "scheduler",
        "page_size": PAGE_SIZE,
        "step_us": step_us,
        "step_us_shared": shared_us,
        "tenants": NUM_TENANTS,
        "prompt_tokens": PROMPT_TOKENS,
        **time_prompts(args.repeats)[0].to_json(),
    }
    _print_table(result)
    return result


def time_steps(num_sequences: int, num_steps: int, *, shared: bool = False) -> float:
    """Return the median microseconds of plan and commit while ``num_sequences`` decode.

    With ``shared``, the sequences belong to ``NUM_TENANTS`` tenants, other sequences wait, and the scheduler
    has a latency target.
    """
    pages_each = -(-(NUM_PROMPT + num_steps + WARM_UP + 2) // PAGE_SIZE)
    blocks = BlockManager(num_sequences * pages_each, PAGE_SIZE)
    limits = Limits(num_sequences * NUM_PROMPT, num_sequences, target_itl=TARGET_ITL_S if shared else None)
    scheduler = Scheduler(blocks, limits, waiting=WaitingQueue(weights={}) if shared else None)
    rng = random.Random(SEED)
    for number in range(num_sequences * (2 if shared else 1)):
        prompt = [rng.randrange(VOCABULARY) for _ in range(NUM_PROMPT - number % PAGE_SIZE)]
        tenant = f"tenant {number % NUM_TENANTS}" if shared else ""
        scheduler.add(Sequence(str(number), prompt, num_steps + WARM_UP + 2, tenant=tenant))
    results = [SampleResult(7)] * num_sequences
    seconds = [_step(scheduler, results) for _ in range(1 + WARM_UP + num_steps)]
    return statistics.median(seconds[1 + WARM_UP :]) * 1e6


def time_prompts(repeats: int, *peers: Callable[[list[int]], float]) -> list[PromptTimes]:
    """Return times of long prompts for Octavo's block manager and for each peer."""
    rng = random.Random(SEED)
    blocks = BlockManager(PROMPT_POOL, PAGE_SIZE)
    engines: list[Callable[[list[int]], float]] = [functools.partial(_serve_prompt, blocks), *peers]
    times = [PromptTimes() for _ in engines]
    for number in range(-_FILL, repeats):
        prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        for serve, own in zip(engines, times, strict=True):
            cold, warm = serve(prompt), serve(prompt)
            if number >= 0:
                own.cold.append(cold)
                own.warm.append(warm)
    return times


def _step(scheduler: Scheduler, results: list[SampleResult]) -> float:
    began = time.perf_counter()
    step = scheduler.plan()
    assert step is not None
    scheduler.commit(step, results)
    scheduler.observe(step, SIMULATED_STEP_S)
    return time.perf_counter() - began


def _serve_prompt(blocks: BlockManager, prompt: list[int]) -> float:
    began = time.perf_counter()
    table = blocks.open(prompt)
    assert blocks.reserve(table, len(prompt))
    blocks.commit(table, prompt, len(prompt))
    blocks.close(table)
    return time.perf_counter() - began


def _print_table(result: dict[str, Any]) -> None:
    print(f"{'decoding sequences':>20}  {'us per step':>12}  {'us per sequence':>16}  {'shared, us':>12}")
    for num, step_us in result["step_us"].items():
        shared_us = result["step_us_shared"][num]
        print(f"{num:>20}  {step_us:>12.1f}  {step_us / int(num):>16.2f}  {shared_us:>12.1f}")
    for name in ("cold", "warm"):
        millis = result[f"prompt_{name}_us"] / 1e3
        print(f"{result['prompt_tokens']} tokens of prompt, {name}: {millis:.2f} ms")
