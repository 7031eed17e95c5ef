"""Find the text that is closest in meaning to a query.

    python examples/embeddings.py [--model demo]

Any decoder model gives embeddings; models trained for embeddings give good ones.
"""

from __future__ import annotations

import argparse

import numpy as np

from octavo.engine import LLM, EngineConfig

TEXTS = ["Bread is baked from flour.", "The ship left the harbour at dawn.", "A compass points to the north."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--query", default="How do sailors find their way?")
    args = parser.parse_args()
    with LLM(EngineConfig(model=args.model)) as llm:
        query, *texts = np.array(llm.embed([args.query, *TEXTS], pooling="mean"))
    for text, score in sorted(zip(TEXTS, texts @ query, strict=True), key=lambda pair: -pair[1]):
        print(f"{score:6.3f}  {text}")


if __name__ == "__main__":
    main()
