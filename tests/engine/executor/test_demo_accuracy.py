"""The demo model answers from its context, with 16-bit and 4-bit pages.

A lost page, swapped pages or positions off by one turn most answers wrong.
The floors are a few points below the measured accuracy."""

from __future__ import annotations

import pytest

from demo_model.evaluate import Question, questions, score
from octavo.engine import LLM, EngineConfig
from octavo_lab.bench.ledgers.documents import held_out

pytestmark = pytest.mark.parity


@pytest.mark.parametrize(("kv_format", "floor"), [("bf16", 0.96), ("fp4", 0.9)])
def test_answers_come_from_the_pages(kv_format: str, floor: float) -> None:
    asked = questions(held_out(512, 8))
    assert len(asked) > 40
    with LLM(EngineConfig(model="demo", kv_format=kv_format, num_pages=512)) as llm:
        result = score(llm, asked)
    assert result.accuracy >= floor, result.as_dict()
    # Later questions repeat the ledger and the earlier turns, so most tokens must be cached.
    assert result.cached_tokens > 0.6 * result.prompt_tokens


def test_the_score_counts_wrong_answers() -> None:
    """Negative control: the model cannot answer a question about another ledger."""
    ledgers = held_out(256, 8)
    asked = questions(ledgers[:4])
    others = questions(ledgers[4:])
    moved = [
        Question(item.kind, other.prompt, item.answer) for item, other in zip(asked, others, strict=False)
    ]
    with LLM(EngineConfig(model="demo", kv_format="bf16", num_pages=256)) as llm:
        assert score(llm, moved).accuracy < 0.3
