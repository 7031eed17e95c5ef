from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.api.output_collector import OutputCollector, completion_of, delta_bytes
from octavo.engine.api.outputs import Delta, FinishReason, PromptLogprobs, TokenLogprob

LOGPROBS = [TokenLogprob(token, -0.5, ((1, -0.5), (2, -0.75))) for token in range(2)]
PIECES = st.tuples(
    st.sampled_from([(), (1,), (2, 3)]), st.sampled_from(["", "a", "bc"]), st.sampled_from([[], LOGPROBS])
)


@given(pieces=st.lists(PIECES, min_size=1, max_size=8), finished=st.booleans(), scored=st.integers(0, 8))
def test_the_collector_joins_deltas_like_a_plain_loop(
    pieces: list[tuple[tuple[int, ...], str, list[TokenLogprob]]], finished: bool, scored: int
) -> None:
    prompt = PromptLogprobs(3, (TokenLogprob(4, -0.5),))
    collector = OutputCollector()
    assert collector.is_empty
    for number, (ids, text, logprobs) in enumerate(pieces):
        last = finished and number == len(pieces) - 1
        delta = Delta(
            request_id="r",
            index=2,
            token_ids=ids,
            text=text,
            logprobs=tuple(logprobs),
            finish_reason=FinishReason.STOP if last else None,
            stop_match="x" if last else None,
            prompt_tokens=7,
            cached_tokens=number,
            prompt_logprobs=prompt if number == scored else None,
        )
        before = collector.num_bytes
        collector.add(delta)
        assert collector.num_bytes == before + delta_bytes(delta)
    assert collector.is_finished == finished
    whole = collector.take()
    assert whole == Delta(
        request_id="r",
        index=2,
        token_ids=tuple(token for ids, _, _ in pieces for token in ids),
        text="".join(text for _, text, _ in pieces),
        logprobs=tuple(entry for _, _, logprobs in pieces for entry in logprobs),
        finish_reason=FinishReason.STOP if finished else None,
        stop_match="x" if finished else None,
        prompt_tokens=7,
        cached_tokens=len(pieces) - 1,
        prompt_logprobs=prompt if scored < len(pieces) else None,
    )
    assert collector.is_empty
    assert not collector.num_bytes
    found = completion_of(whole)
    assert (found.index, found.text, tuple(found.token_ids)) == (2, whole.text, whole.token_ids)
    assert tuple(found.logprobs) == whole.logprobs


def test_output_after_the_end_is_a_bug() -> None:
    collector = OutputCollector()
    collector.add(Delta(request_id="r", index=0, finish_reason=FinishReason.STOP))
    with pytest.raises(AssertionError, match="after its end"):
        collector.add(Delta(request_id="r", index=0))


def test_logprobs_dominate_the_counted_bytes() -> None:
    entry = TokenLogprob(1, -0.5, tuple((token, -1.0) for token in range(20)))
    delta = Delta(request_id="r", index=0, token_ids=(1,), logprobs=(entry,))
    assert 2_000 < delta_bytes(delta) < 6_000
    prompt = Delta(request_id="r", index=0, prompt_logprobs=PromptLogprobs(1, (entry,) * 100))
    assert delta_bytes(prompt) > 200_000
