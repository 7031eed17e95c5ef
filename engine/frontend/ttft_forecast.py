"""Forecast of a new request's time to first token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from ..api.config import EngineConfig
from ..api.engine_request import EngineRequest
from ..api.stats import Gauges


class TtftForecast:
    """Forecast from the tokens to compute before a request's first one, and a prompt token's recent time.

    Before it come prompts of its priority and of smaller ones. Those that wait will find as much in the
    prefix cache as others did lately. With fairness another tenant's come before it as far as that is
    served as much as its own meanwhile, by their weights.
    """

    def __init__(self, config: EngineConfig, unfinished: Collection[EngineRequest]) -> None:
        """``unfinished``: requests that were admitted and have not ended, a live view."""
        self._unfinished = unfinished
        self._is_fair = config.is_fair
        self._weights = config.tenant_weight_by_name

    def expected_ms(self, request: EngineRequest, gauges: Gauges, num_cached: int = 0) -> float | None:
        """Milliseconds until the first token of a request that is let in now; None before any prompt was
        computed. ``num_cached``: tokens of it that are in the prefix cache."""
        if gauges.prompt_token_s is None:
            return None
        tenant = request.namespace.tenant
        waiting: dict[str, float] = defaultdict(float)  # tokens by tenant
        num_tokens = 0.0  # of those that run
        for other in self._unfinished:
            if other.priority > request.priority:
                continue
            left = gauges.prompts_left.get(other.number)
            if left is not None:
                num_tokens += left
            else:
                waiting[other.namespace.tenant] += other.num_prompt * gauges.prompt_miss_share
        own = waiting.pop(tenant, 0.0) + request.num_prompt - num_cached
        if self._is_fair:
            weight = self._weights.get(tenant, 1.0)
            turns = (own * self._weights.get(each, 1.0) / weight for each in waiting)
            num_tokens += sum(map(min, waiting.values(), turns))
        else:
            num_tokens += sum(waiting.values())
        return (num_tokens + own) * gauges.prompt_token_s * 1e3
