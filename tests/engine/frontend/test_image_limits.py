from __future__ import annotations

import pytest

from fakes import small_config
from octavo.engine.api.engine_request import EngineRequest
from octavo.engine.api.errors import Overloaded
from octavo.engine.api.image import PromptImage
from octavo.engine.api.output_collector import prompt_logprobs_bytes
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.stats import Gauges
from octavo.engine.frontend import request_limiter
from octavo.engine.frontend.request_limiter import RequestLimiter, UnreadOutput


def request_with(num_bytes: int, params: SamplingParams | None = None) -> EngineRequest:
    images = (PromptImage(0, 1, 1, b"", bytes(num_bytes)),) if num_bytes else ()
    return EngineRequest(
        request_id="",
        prompt_ids=[1],
        params=params or SamplingParams(),
        max_tokens=1,
        arrived_at=0.0,
        images=images,
    )


def test_pixels_of_unfinished_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limiter, "MAX_PIXEL_BYTES", 100)
    unfinished: list[EngineRequest] = []
    limiter = RequestLimiter(small_config(), unfinished, UnreadOutput(), Gauges)
    limiter.check_memory(request_with(500))
    unfinished += [request_with(60), request_with(0)]
    limiter.check_memory(request_with(40))
    limiter.check_memory(request_with(0))
    with pytest.raises(Overloaded, match="take 60 bytes, and the 41 bytes of this request"):
        limiter.check_memory(request_with(41))


def test_prompt_scores_of_unfinished_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    size = prompt_logprobs_bytes(1, 20)
    monkeypatch.setattr(request_limiter, "MAX_SCORE_BYTES", 2 * size)
    unfinished: list[EngineRequest] = []
    limiter = RequestLimiter(small_config(), unfinished, UnreadOutput(), Gauges)
    scored = request_with(0, SamplingParams(prompt_logprobs=20, n=64))
    limiter.check_memory(scored)
    unfinished += [scored, request_with(0)]
    limiter.check_memory(scored)
    unfinished.append(scored)
    limiter.check_memory(request_with(0))
    with pytest.raises(Overloaded, match=f"take {2 * size} bytes, and the {size} bytes of this request"):
        limiter.check_memory(scored)
