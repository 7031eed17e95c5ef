"""Processor time of a decode step by its number of draft rows.

    python tests/bench/bench_draft_rows.py MODEL [--rounds 5] [--tokens 320]

Each draft is one more row of its sequence.
"gain at most": factor on tokens per second of processor time, if all drafts are accepted."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from octavo.block_manager import BlockManager
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor.batch import build_batch
from octavo.engine.executor.load import load_runner
from octavo.engine.executor.sampling.sampler import SampleState
from octavo.scheduler import ScheduledChunk, SchedulerOutput, Sequence

ROWS = {1: (1, 2, 3, 4, 5, 7, 9), 8: (8, 9, 10, 12, 16, 24, 40, 72)}
WARMUPS = 2  # a shape runs as a captured program from its third step on


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=320)
    args = parser.parse_args()
    page_size, most = 32, max(ROWS)
    pages = -(-(args.tokens + max(ROWS[most])) // page_size)
    config = EngineConfig(
        model=args.model, num_pages=most * pages, max_running=most, max_step_tokens=512, page_size=page_size
    )
    runner = load_runner(config)
    blocks = BlockManager(runner.info.num_pages, page_size, prefix_cache=False)
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = rng.integers(0, min(1000, runner.info.vocab_size), count).tolist()
        return drawn

    def seconds(work: list[ScheduledChunk]) -> float:
        states = [
            SampleState(SamplingParams(), seed=0, prompt_ids=[], vocab_size=runner.info.vocab_size)
            for item in work
            for _ in range(1 + len(item.drafts))
            if item.samples
        ]
        batch = build_batch(SchedulerOutput(tuple(work)), page_size)
        began = time.process_time()
        runner.run(batch, states)
        return time.process_time() - began

    sequences = []
    for number in range(most):
        sequence = Sequence(str(number), tokens(args.tokens), 100)
        sequence.table = blocks.open(sequence.tokens, find=False)
        assert blocks.reserve(sequence.table, pages * page_size)
        for start in range(0, args.tokens, 512):
            seconds([ScheduledChunk(sequence, start, min(start + 512, args.tokens), False)])
        sequences.append(sequence)

    def step(batch: int, rows: int) -> float:
        drafts = [rows // batch - 1 + (index < rows % batch) for index in range(batch)]
        last = args.tokens - 1
        return seconds(
            [
                ScheduledChunk(each, last, last + 1, True, drafts=tuple(tokens(count)))
                for each, count in zip(sequences, drafts, strict=False)
            ]
        )

    cases = [(batch, rows) for batch, counts in ROWS.items() for rows in counts]
    times: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for number in range(WARMUPS + args.rounds):
        for case in cases:
            taken = step(*case)
            if number >= WARMUPS:
                times[case].append(taken)
    results: list[dict[str, Any]] = []
    print("sequences  rows  times the step without drafts  gain at most")
    for batch, rows in cases:
        pairs = zip(times[batch, rows], times[batch, batch], strict=True)
        ratio = statistics.median(with_drafts / without for with_drafts, without in pairs)
        results.append({"sequences": batch, "rows": rows, "ratio": ratio, "most": rows / batch / ratio})
        print(f"{batch:9d} {rows:5d} {ratio:30.2f} {rows / batch / ratio:13.2f}")
    print(json.dumps({"bench": "draft_rows", "model": runner.info.name, "results": results}))
    runner.close()


if __name__ == "__main__":
    main()
