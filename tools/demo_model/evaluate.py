"""Exact-match accuracy of the demo model by context length and page format, through Octavo.

    cd tools && python -m demo_model.evaluate --kv-format bf16 fp4 --lengths 128 256 512 1024 2048

Every question about a held-out ledger is one greedy request. Its prompt has the ledger and earlier questions
with their correct answers.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field

from octavo.engine import LLM, EngineConfig, SamplingParams
from octavo.engine.api.outputs import FinishReason
from octavo_lab.bench.ledgers.documents import Ledger, held_out
from octavo_lab.bench.ledgers.kinds import KINDS

MAX_ANSWER_TOKENS = 40  # the longest true answer has 22
KV_MEMORY = 256 << 20  # bytes, enough for all ledgers of one length in any format


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    prompt: str
    answer: str


@dataclass(slots=True)
class Score:
    right: int = 0
    total: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    right_by_kind: Counter[str] = field(default_factory=Counter)
    total_by_kind: Counter[str] = field(default_factory=Counter)

    @property
    def accuracy(self) -> float:
        return self.right / self.total

    def as_dict(self) -> dict[str, object]:
        kinds = {
            kind: f"{self.right_by_kind[kind]}/{total}" for kind, total in sorted(self.total_by_kind.items())
        }
        return {
            "exact": round(self.accuracy, 4),
            "questions": self.total,
            "mean_prompt_tokens": round(self.prompt_tokens / self.total),
            "cached_share": round(self.cached_tokens / self.prompt_tokens, 3),
            **kinds,
        }


def questions(ledgers: list[Ledger]) -> list[Question]:
    """Return all questions in order of their turn, so that each prompt finds cached pages."""
    numbered = [
        (index, Question(ledger.kind, prompt, turn.answer))
        for ledger in ledgers
        for index, (prompt, turn) in enumerate(zip(ledger.prompts(), ledger.turns, strict=True))
    ]
    return [question for _, question in sorted(numbered, key=lambda item: item[0])]


def score(llm: LLM, asked: list[Question]) -> Score:
    result = Score()
    params = SamplingParams(max_tokens=MAX_ANSWER_TOKENS)
    outputs = llm.generate([question.prompt for question in asked], params)
    for question, output in zip(asked, outputs, strict=True):
        completion = output.outputs[0]
        right = completion.finish_reason is FinishReason.STOP and completion.text == question.answer
        result.right += right
        result.total += 1
        result.prompt_tokens += output.prompt_tokens
        result.cached_tokens += output.cached_tokens
        result.right_by_kind[question.kind] += right
        result.total_by_kind[question.kind] += 1
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kv-format", nargs="+", default=["bf16", "fp4"])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--ledgers", type=int, default=24, help="held-out ledgers per length")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", default=[kind.__name__ for kind in KINDS], help="of ledgers")
    options = parser.parse_args()
    suites = {}
    for length in options.lengths:
        ledgers = held_out(length, options.ledgers, seed=options.seed)
        suites[length] = questions([ledger for ledger in ledgers if ledger.kind in options.kinds])
    for kv_format in options.kv_format:
        config = EngineConfig(
            model=options.model, backend=options.backend, kv_format=kv_format, kv_memory=KV_MEMORY
        )
        with LLM(config) as llm:
            for length, asked in suites.items():
                row = {"kv_format": kv_format, "length": length} | score(llm, asked).as_dict()
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
