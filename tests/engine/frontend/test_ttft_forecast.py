"""When a first token is expected, at one second for each prompt token."""

from __future__ import annotations

import pytest

from fakes import small_config
from octavo.engine.api.engine_request import CacheNamespace, EngineRequest
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.stats import Gauges
from octavo.engine.frontend.ttft_forecast import TtftForecast


def request(num_tokens: int, *, tenant: str = "a", priority: int = 0) -> EngineRequest:
    return EngineRequest(
        request_id="r",
        prompt_ids=[1] * num_tokens,
        params=SamplingParams(),
        max_tokens=1,
        arrived_at=0.0,
        priority=priority,
        namespace=CacheNamespace(tenant),
    )


@pytest.mark.parametrize(
    ("config", "mine", "seconds"),
    [
        ({}, {}, 10 + 60 + 5 + 200),
        ({}, {"tenant": "b"}, 10 + 60 + 5 + 200),
        ({}, {"priority": -1}, 10),
        ({}, {"priority": 1}, 10 + 60 + 5 + 200 + 1000),
        ({"schedule_policy": "vtc"}, {}, (10 + 60 + 5) + 75),  # as much for the other tenant
        ({"schedule_policy": "vtc"}, {"tenant": "b"}, (10 + 200) + 65),  # which has no more
        ({"schedule_policy": "dlpm"}, {"tenant": "c"}, 10 + 10 + 10),
        ({"schedule_policy": "vtc", "tenant_weights": "b=2"}, {"tenant": "c"}, 10 + 10 + 20),
    ],
)
def test_prompts_that_come_before_it_count(
    config: dict[str, str], mine: dict[str, object], seconds: float
) -> None:
    others = [request(60), request(5), request(200, tenant="b"), request(1000, priority=1)]
    begun = request(7)
    forecast = TtftForecast(small_config(**config), [*others, begun])
    gauges = Gauges(prompt_token_s=1.0, prompts_left={begun.number: 0})
    new = request(10, **mine)  # type: ignore[arg-type]
    assert forecast.expected_ms(new, gauges) == pytest.approx(seconds * 1e3)


def test_of_prompts_that_were_begun_the_rest_counts() -> None:
    """What is left comes before any other tenant's; a preempted prompt waits again."""
    running, preempted = request(60, tenant="b"), request(60, tenant="b")
    left = {running.number: 20, preempted.number: None}
    gauges = Gauges(prompt_token_s=1.0, prompts_left=left)
    forecast = TtftForecast(small_config(schedule_policy="vtc"), [running, preempted])
    assert forecast.expected_ms(request(10), gauges) == pytest.approx((20 + 10 + 10) * 1e3)


def test_what_is_cached_is_not_computed() -> None:
    forecast = TtftForecast(small_config(), [request(100)])
    gauges = Gauges(prompt_token_s=1.0, prompt_miss_share=0.25)
    assert forecast.expected_ms(request(10), gauges, num_cached=8) == pytest.approx((25 + 2) * 1e3)


def test_before_any_prompt_nothing_is_expected() -> None:
    assert TtftForecast(small_config(), [request(100)]).expected_ms(request(10), Gauges()) is None
