from __future__ import annotations

import pytest

from octavo.engine.client.token_times import RESOLUTION_S, TokenTimes


def times(*messages: tuple[float, int] | tuple[float, int, int]) -> TokenTimes:
    found = TokenTimes(100.0)
    for after, *message in messages:
        found.add(100.0 + after, *message)
    return found


def test_rates_exclude_tokens_of_the_first_message() -> None:
    found = times((0.5, 3), (0.75, 1), (1.0, 4))
    assert (found.ttft_s, found.whole_s, found.num_tokens) == (0.5, 1.0, 8)
    assert found.later_per_s == 5 / 0.5
    assert found.per_s == 8 / 1.0


def test_a_message_is_one_gap_however_many_tokens_it_has() -> None:
    assert times((0.5, 1), (1.5, 10), (1.75, 1)).gaps_s == [1.0, 0.25]


@pytest.mark.parametrize(
    "messages",
    [
        [(0.5, 8)],
        [(0.5, 8), (0.5, 0)],
        [(0.5, 8), (1.0, 0)],
        [(0.5, 1), (0.5, 7)],
        [(0.5, 1), (0.5 + 2e-5, 7)],
        [(0.5, 1), *((0.5 + n * 1e-4, 1) for n in range(1, 8))],
    ],
)
def test_tokens_in_one_message_have_no_rate(messages: list[tuple[float, int]]) -> None:
    found = times(*messages)
    assert found.later_per_s is None
    assert found.per_s == pytest.approx(8 / messages[-1][0])


def test_first_tokens_of_samples_count_as_simultaneous() -> None:
    began = [(0.5 + sample / 100, 1, sample) for sample in range(4)]
    assert times(*began).later_per_s is None
    found = times(*began, *((1.5, 1, sample) for sample in range(4)))
    assert found.later_per_s == pytest.approx(4 / 1.0)


def test_an_end_without_tokens_does_not_lower_the_rate() -> None:
    assert times((0.5, 1), (1.0, 1), (9.0, 0)).later_per_s == 2.0


def test_a_rate_needs_a_span_that_a_client_can_measure() -> None:
    assert times((0.0, 1), (RESOLUTION_S / 2, 1)).later_per_s is None
    assert times((0.0, 1), (2 * RESOLUTION_S, 1)).later_per_s == pytest.approx(1 / (2 * RESOLUTION_S))


def test_no_tokens_and_no_time_are_no_error() -> None:
    assert (times().per_s, times().ttft_s, times().later_per_s) == (0.0, 0.0, None)
    assert (times((0.25, 0)).per_s, times((0.25, 0)).ttft_s) == (0.0, 0.25)
