"""Measure what the prefix cache saves when two requests share a long prefix.

    python examples/prefix_cache.py [--model demo]

The first request computes every prompt token. The second request reuses the pages of the common prefix.
"""

from __future__ import annotations

import argparse

from octavo.engine import LLM, EngineConfig, SamplingParams

BEGINNING = "Once there was a baker who lived at the end of a long street. " * 20
QUESTIONS = ("What did the baker do?", "Where did the baker live?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    with LLM(EngineConfig(model=args.model)) as llm:
        for question in QUESTIONS:
            (output,) = llm.generate(BEGINNING + question, SamplingParams(max_tokens=8))
            found, prompt = output.cached_tokens, output.prompt_tokens
            print(f"{question:28} {found} of {prompt} prompt tokens found in the cache")


if __name__ == "__main__":
    main()
