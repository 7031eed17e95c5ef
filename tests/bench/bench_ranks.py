"""Measure what sending a step to another rank adds to the step, without compute and sums.

    mlx.launch -n 2 --backend ring -- python tests/bench/bench_ranks.py [--sequences 1,8,64] [--blocks 20]

Both ranks repeat one captured decode step: led by rank 0, which sends the step and waits for the answer, and
unled, where each rank has the step. The difference is the overhead. Percentiles are of single steps; low ones
are those of steps during which no other program took a core. The last line is JSON."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.arguments.usage import counts
from octavo.engine.core.build import build_core
from octavo.engine.core.request import Request
from octavo.engine.executor.parallel import runner as ranks
from octavo.engine.executor.parallel.group import FollowingGroup

NUM_STEPS, NUM_PROMPT, NUM_OUTPUT = 100, 256, 64  # steps of a block, tokens of a sequence
PERCENTILES = (1, 10, 50)


def follow() -> None:
    group = FollowingGroup()
    (leader,) = group.steps
    config = leader.recv()
    part = ranks._part_of(config, group)
    runner = ranks._load(config, group, part, None)
    leader.send((runner.info.memory, runner.page_shape, ranks._files_of(runner)))
    while True:
        try:
            message = leader.recv()
        except EOFError:
            return
        batch, times = message if type(message) is tuple else (message, 1)
        for _ in range(times):
            failed = part.follow(runner, batch)
        leader.send(failed)


def decode_step(core: Any, num_sequences: int) -> tuple[Any, Any]:
    runner, steps = core._runner, []
    run = runner.run

    def capture(batch: Any, states: Any) -> Any:
        steps.append((batch, states))
        return run(batch, states)

    runner.run = capture
    for number in range(num_sequences):
        ids = [(7 * index + number) % 250 for index in range(NUM_PROMPT)]
        params = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True)
        core.add(
            Request(
                f"{num_sequences}-{number}", ids, params, max_tokens=NUM_OUTPUT, tokenizer=core.tokenizer,
                vocab_size=core.info.vocab_size, arrived_at=0.0,
            )
        )  # fmt: skip
    while core.has_work:
        core.step()
    del runner.run
    step: tuple[Any, Any] = next(step for step in reversed(steps) if len(step[0].token_ids) == num_sequences)
    return step


def micros(step: Callable[[], object]) -> list[float]:
    ends = [time.perf_counter()]
    for _ in range(NUM_STEPS):
        step()
        ends.append(time.perf_counter())
    return [(end - start) * 1e6 for start, end in itertools.pairwise(ends)]


def measure(core: Any, num_sequences: int, num_blocks: int) -> dict[str, list[float]]:
    runner: Any = core._runner
    batch, states = decode_step(core, num_sequences)
    plain = batch._replace(inputs=dict(batch.inputs))

    def unled_step() -> None:
        runner._inner.run(runner._part.receive(batch), states)

    found: dict[str, list[float]] = {"led": [], "unled": []}
    for _ in range(num_blocks):
        runner._group.tell((plain, NUM_STEPS))
        found["unled"] += micros(unled_step)
        runner._group.answers()
        found["led"] += micros(lambda: runner.run(batch, states))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--sequences", type=counts, default=(1, 8, 64))
    parser.add_argument("--blocks", type=int, default=20)
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model, tensor_parallel=2, threads=1, num_pages=1280, max_running=64, speculate="off",
        target_itl="off",
    )  # fmt: skip
    core = build_core(config)
    rows: list[dict[str, Any]] = []
    for number in args.sequences:
        found = measure(core, number, args.blocks)
        row: dict[str, Any] = {"sequences": str(number)}
        for percent in PERCENTILES:
            led, unled = np.percentile(found["led"], percent), np.percentile(found["unled"], percent)
            row[f"p{percent}"] = {
                "led_us": round(led),
                "unled_us": round(unled),
                "overhead_us": round(led - unled),
            }
            print(f"{number:3} sequences, {percent} %: {row[f'p{percent}']}")
        rows.append(row)
    print(json.dumps({"steps": NUM_STEPS, "prompt_tokens": NUM_PROMPT, "rows": rows}))
    core._runner.close()


if __name__ == "__main__":
    follow() if os.environ.get("MLX_RANK", "0") != "0" else main()
