"""Answer more rows than fit into memory, with a pool of engines that Ray Data feeds.

    python examples/ray_data.py ANSWERS [--model demo] [--rows 128] [--engines 2]

Rows are made as they are needed and written as they are answered. See docs/guides/ray.md.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import ray

from octavo.engine import LLM, EngineConfig, SamplingParams

STORE_BYTES = 100 * 2**20  # memory for rows on their way, less than all rows have
BATCH = 16


class Answer:
    """One engine per actor. Each call answers a batch of rows, which share pages of common beginnings."""

    def __init__(self, model: str) -> None:
        self._llm = LLM(EngineConfig(model=model, threads=1, max_running=BATCH))

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        prompts = [str(prompt) for prompt in rows["prompt"]]
        outputs = self._llm.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True), progress=False)
        return {
            "id": rows["id"],
            "answer": np.array([output.outputs[0].text for output in outputs], dtype=object),
            "prompt_tokens": np.array([output.prompt_tokens for output in outputs]),
            "cached_tokens": np.array([output.cached_tokens for output in outputs]),
            "engine": np.full(len(prompts), os.getpid()),
        }


def documents(rows: dict[str, Any]) -> dict[str, Any]:
    """Make rows of 1 MiB; in your program, read them with ``ray.data.read_parquet``."""
    about = [f"Ledger {n // BATCH}. {f'Petra Sorel lives in house {n // BATCH}. ' * 12}" for n in rows["id"]]
    return {
        "id": rows["id"],
        "prompt": np.array(
            [f"{text}Question {n}?" for text, n in zip(about, rows["id"], strict=True)], dtype=object
        ),
        "document": np.array([bytes(2**20)] * len(about), dtype=object),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("answers")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--engines", type=int, default=2)
    args = parser.parse_args()
    ray.init(
        num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=STORE_BYTES
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    blocks = max(8, args.rows // BATCH)
    data = ray.data.range(args.rows, override_num_blocks=blocks).map_batches(documents, batch_size=BATCH)
    engines = ray.data.ActorPoolStrategy(size=args.engines)
    data.map_batches(
        Answer, fn_constructor_args=(args.model,), batch_size=BATCH, compute=engines, num_cpus=0.5
    ).write_json(args.answers)
    print(f"{args.rows} rows of {args.rows} MiB through {STORE_BYTES >> 20} MiB", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
