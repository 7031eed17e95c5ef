from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import small_config
from octavo.engine.api.engine_request import EngineOutput, EngineRequest
from octavo.engine.api.errors import Overloaded
from octavo.engine.api.output_collector import prompt_logprobs_bytes
from octavo.engine.api.outputs import Delta, FinishReason, PromptLogprobs, TokenLogprob
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.stats import Gauges
from octavo.engine.frontend import output_streams
from octavo.engine.frontend.output_streams import OutputStreams, Stream


class _Request:
    def __init__(self, n: int) -> None:
        self.params = SamplingParams(n=n)


def make_stream(*, n: int = 1, final_only: bool = False) -> Stream:
    return Stream(_Request(n), lambda _: None, final_only=final_only)  # type: ignore[arg-type]


def token(number: int, *, index: int = 0, last: bool = False) -> Delta:
    reason = FinishReason.LENGTH if last else None
    return Delta(request_id="r", index=index, token_ids=(number,), text=f"{number} ", finish_reason=reason)


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


async def test_log_probabilities_held_until_the_end_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_streams, "MAX_HELD_LIMITS", 1)
    monkeypatch.setattr("octavo.engine.frontend.request_limiter.MAX_UNREAD_BYTES", 50_000)
    aborted: list[EngineRequest] = []
    streams = OutputStreams(small_config(), abort=aborted.append, gauges=Gauges)
    few, many = (
        streams.add(
            EngineRequest(
                request_id=name,
                prompt_ids=[1],
                params=SamplingParams(n=2, logprobs=20),
                max_tokens=99,
                arrived_at=0.0,
            ),
            aborted.append,
            final_only=True,
        )
        for name in ("few", "many")
    )
    entry = (TokenLogprob(token_id=1, logprob=-1.0, top=((1, -1.0),) * 20),)
    for number in range(40):
        delta = Delta(request_id="r", index=number % 2, token_ids=(1,), logprobs=entry)
        streams.push(
            [EngineOutput(few.request.number, delta)] * (number < 4)
            + [EngineOutput(many.request.number, delta)]
        )
    assert aborted == [many.request]
    with pytest.raises(Overloaded, match="request a stream"):
        await many.next()
    assert few.num_held_bytes == streams._unread.num_held_bytes > 0
    few.push(Delta(request_id="r", index=0, finish_reason=FinishReason.LENGTH))
    streams.close(few)
    assert streams._unread.num_held_bytes == 0
