"""Greedy tokens of one engine over several ranks, in a new process: MLX has one group per process.

    python ranked.py MODEL RANKS [SETTINGS]

SETTINGS and the output are JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from octavo.engine import LLM, EngineConfig, SamplingParams

PROMPTS = [
    [(7 * i * (n + 1) + n) % 250 for i in range(length)] for n, length in enumerate((3, 40, 17, 70, 40))
]
SETTINGS: dict[str, Any] = {
    "threads": 1, "num_pages": 64, "page_size": 8, "max_running": 4, "max_step_tokens": 32,
}  # fmt: skip


def answers(model: Path, num_ranks: int, **settings: Any) -> dict[str, Any]:
    """Return answers to all prompts in one batch, then each alone from cached pages."""
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=1)
    config = EngineConfig(model=str(model), tensor_parallel=num_ranks, **(SETTINGS | settings))
    with LLM(config) as llm:
        first = llm.generate(PROMPTS, params, progress=False)
        alone = [llm.generate([prompt], params, progress=False)[0] for prompt in PROMPTS]

        def said(output: Any) -> tuple[list[int], list[float]]:
            sample = output.outputs[0]
            return list(sample.token_ids), [each.logprob for each in sample.logprobs]

        return {
            "tokens": [said(output)[0] for output in first],
            "same_alone": [said(output) for output in first] == [said(output) for output in alone],
            "cached": [output.cached_tokens for output in alone],
            "page_bytes": llm.info.memory.pages,
        }


def in_ranks(model: Path, num_ranks: int, **settings: Any) -> dict[str, Any]:
    command = [sys.executable, __file__, str(model), str(num_ranks), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    print(json.dumps(answers(Path(sys.argv[1]), int(sys.argv[2]), **json.loads(sys.argv[3]))))
