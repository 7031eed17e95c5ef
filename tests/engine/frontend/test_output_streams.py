"""A stream between the engine and its reader: what merges, and what waits."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.api.output_collector import prompt_logprobs_bytes
from octavo.engine.api.outputs import Delta, FinishReason, PromptLogprobs, TokenLogprob
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.frontend.output_streams import Stream


class _Request:
    """As much of a request as a stream looks at."""

    def __init__(self, n: int) -> None:
        self.params = SamplingParams(n=n)


def make_stream(*, n: int = 1, final_only: bool = False) -> Stream:
    return Stream(_Request(n), lambda _: None, final_only=final_only)  # type: ignore[arg-type]


def token(number: int, *, index: int = 0, last: bool = False) -> Delta:
    reason = FinishReason.LENGTH if last else None
    return Delta(request_id="r", index=index, token_ids=(number,), text=f"{number} ", finish_reason=reason)


async def test_each_token_is_read_at_once_by_default() -> None:
    stream = make_stream()
    for number in range(3):
        stream.push(token(number))
        delta = await stream.next()
        assert delta is not None
        assert delta.token_ids == (number,)


async def test_a_slow_reader_gets_one_merged_delta() -> None:
    stream = make_stream()
    for number in range(3):
        stream.push(token(number, last=number == 2))
    delta = await stream.next()
    assert delta is not None
    assert (delta.token_ids, delta.text, delta.finish_reason) == ((0, 1, 2), "0 1 2 ", FinishReason.LENGTH)
    assert await stream.next() is None


async def test_a_final_stream_holds_tokens_back_until_their_sample_has_ended() -> None:
    stream = make_stream(final_only=True)
    for number in range(3):
        stream.push(token(number))
    reading = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    assert not reading.done()
    stream.push(token(3, last=True))
    delta = await reading
    assert delta is not None
    assert delta.token_ids == (0, 1, 2, 3)


@given(
    final_only=st.booleans(),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
)
def test_no_token_is_lost_or_out_of_order(final_only: bool, lengths: list[int], order: object) -> None:
    async def run() -> dict[int, list[int]]:
        stream = make_stream(n=len(lengths), final_only=final_only)
        turns = [index for index, length in enumerate(lengths) for _ in range(length)]
        order.shuffle(turns)  # type: ignore[attr-defined]
        done = [0] * len(lengths)
        for index in turns:
            done[index] += 1
            stream.push(token(done[index], index=index, last=done[index] == lengths[index]))
        read: dict[int, list[int]] = {index: [] for index in range(len(lengths))}
        while (delta := await stream.next()) is not None:
            read[delta.index] += delta.token_ids
        return read

    assert asyncio.run(run()) == {index: list(range(1, length + 1)) for index, length in enumerate(lengths)}


async def test_log_probabilities_of_a_prompt_count_once_for_all_samples() -> None:
    shared = PromptLogprobs(1, (TokenLogprob(token_id=1, logprob=-1.0, top=((1, -1.0),) * 20),) * 500)
    stream = make_stream(n=16)
    for index in range(16):
        stream.push(Delta(request_id="r", index=index, token_ids=(1,), prompt_logprobs=shared))
    assert prompt_logprobs_bytes(500, 20) <= stream.num_pending_bytes < 2 * prompt_logprobs_bytes(500, 20)
