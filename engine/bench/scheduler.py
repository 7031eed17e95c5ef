"""``octavo bench scheduler``: what deciding costs, without any model.

Microseconds per step, plan and commit, while N sequences decode; and what the block manager
takes for a long prompt (open, reserve, commit, close), when none of it and when all of it is
in the prefix cache. Standard library only.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from octavo.block_manager import BlockManager
from octavo.scheduler import Limits, Result, Scheduler, Sequence

PAGE_SIZE = 32
NUM_PROMPT = 200
PROMPT_TOKENS = 32_768
VOCABULARY = 150_000
WARM_UP = 8  # steps
SEED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sequences", type=_counts, default=(1, 64, 256, 1024), metavar="N,N", help="(1,64,256,1024)"
    )
    parser.add_argument("--steps", type=_positive, default=256, metavar="N", help="steps to time (256)")
    parser.add_argument("--repeats", type=_positive, default=20, metavar="N", help="prompts to time (20)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, return what --json prints."""
    step_us = {str(num): time_steps(num, args.steps) for num in args.sequences}
    cold_us, warm_us = time_prompt(args.repeats)
    result = {
        "bench": "scheduler",
        "page_size": PAGE_SIZE,
        "step_us": step_us,
        "prompt_tokens": PROMPT_TOKENS,
        "prompt_cold_us": cold_us,
        "prompt_warm_us": warm_us,
    }
    _print_table(result)
    return result


def time_steps(num_sequences: int, num_steps: int) -> float:
    """Median microseconds of plan and commit while ``num_sequences`` decode. Their prompts differ
    in length, so that each step publishes its share of pages."""
    pages_each = -(-(NUM_PROMPT + num_steps + WARM_UP + 2) // PAGE_SIZE)
    blocks = BlockManager(num_sequences * pages_each, PAGE_SIZE)
    scheduler = Scheduler(blocks, Limits(num_sequences * NUM_PROMPT, num_sequences))
    rng = random.Random(SEED)
    for number in range(num_sequences):
        length = NUM_PROMPT - number % PAGE_SIZE
        scheduler.add(
            Sequence(str(number), [rng.randrange(VOCABULARY) for _ in range(length)], num_steps + WARM_UP + 2)
        )
    results = [Result(7)] * num_sequences
    seconds = [_step(scheduler, results) for _ in range(1 + WARM_UP + num_steps)]
    return statistics.median(seconds[1 + WARM_UP :]) * 1e6


def time_prompt(repeats: int) -> tuple[float, float]:
    """Median microseconds for a long prompt nobody has seen, evicting older pages, and for the
    same prompt again."""
    rng = random.Random(SEED)
    blocks = BlockManager(2 * PROMPT_TOKENS // PAGE_SIZE, PAGE_SIZE)
    cold, warm = [], []
    for _ in range(repeats + 3):  # the first ones fill the pool
        prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        cold.append(_serve_prompt(blocks, prompt))
        warm.append(_serve_prompt(blocks, prompt))
    return statistics.median(cold[3:]) * 1e6, statistics.median(warm[3:]) * 1e6


def _step(scheduler: Scheduler, results: list[Result]) -> float:
    """Seconds of one step in which every sequence gets a token."""
    began = time.perf_counter()
    step = scheduler.plan()
    assert step is not None
    scheduler.commit(step, results)
    return time.perf_counter() - began


def _serve_prompt(blocks: BlockManager, prompt: list[int]) -> float:
    """Seconds from the first look-up to the last page given back."""
    began = time.perf_counter()
    table = blocks.open(prompt)
    assert blocks.reserve(table, len(prompt))
    blocks.commit(table, prompt, len(prompt))
    blocks.close(table)
    return time.perf_counter() - began


def _print_table(result: dict[str, Any]) -> None:
    print(f"{'decoding sequences':>20}  {'us per step':>12}  {'us per sequence':>16}")
    for num, step_us in result["step_us"].items():
        print(f"{num:>20}  {step_us:>12.1f}  {step_us / int(num):>16.2f}")
    for name in ("cold", "warm"):
        seconds = result[f"prompt_{name}_us"] / 1e6
        print(f"{result['prompt_tokens']} tokens of prompt, {name}: {seconds * 1e3:.2f} ms")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))
