"""Answer a file of prompts, one per line, and write one JSON line per answer.

    python examples/batch.py prompts.txt answers.jsonl [--model demo]

The engine batches all prompts; prompts with a common prefix share pages.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from octavo.engine import LLM, EngineConfig, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    prompts = args.prompts.read_text().splitlines()
    with LLM(EngineConfig(model=args.model)) as llm, args.answers.open("w") as file:
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        for prompt, output in zip(
            prompts, llm.chat(conversations, SamplingParams(max_tokens=64)), strict=True
        ):
            file.write(json.dumps({"prompt": prompt, "answer": output.outputs[0].text}) + "\n")


if __name__ == "__main__":
    main()
