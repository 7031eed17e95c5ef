from __future__ import annotations

from collections.abc import Sequence

import pytest

from octavo.engine.api.outputs import Delta, FinishReason
from octavo.engine.cli.answer import Answer


def answered(messages: Sequence[tuple[float, int]]) -> Answer:
    readings = iter([5.0, *(5.0 + after for after, _ in messages)])
    answer = Answer(1, clock=lambda: next(readings))
    for number, (_, num_tokens) in enumerate(messages, 1):
        ended = FinishReason.LENGTH if number == len(messages) else None
        answer.add(
            Delta(request_id="r", index=0, token_ids=(7,) * num_tokens, prompt_tokens=3, finish_reason=ended)
        )
    return answer


def test_the_rate_ignores_the_first_message() -> None:
    answer = answered([(0.5, 2), (1.0, 1), (1.5, 3)])
    assert "first token after 0.500 s, then 4.0 tokens/s; finish reason length" in answer.summary()
    assert (answer.as_json()["ttft_s"], answer.as_json()["tokens_per_s"]) == (0.5, 4.0)


@pytest.mark.parametrize("messages", [[(0.5, 6)], [(0.5, 1), (0.5 + 1e-5, 5)]])
def test_an_answer_in_one_message_is_timed_as_a_whole(messages: list[tuple[float, int]]) -> None:
    answer = answered(messages)
    assert "6 generated, first token after 0.500 s, 12.0 tokens/s in total" in answer.summary()
    assert answer.as_json()["tokens_per_s"] == pytest.approx(12.0, rel=1e-4)
