"""Prompt tokens of requests before their first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from ..api.engine_request import EngineRequest
from ..api.stats import NO_PROMPTS, Gauges


class WaitingPrompts:
    """Counts the prompt tokens of requests that have had no step yet. Lives on the event loop. A query costs
    nothing until the engine's gauges change, because every request asks before its admission."""

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self._gauges = gauges
        self._begun: Mapping[int, int | None] = NO_PROMPTS  # prompts begun, as of the last query
        self._waiting: dict[int, EngineRequest] = {}
        self._num_tokens: Counter[str] = Counter()  # by tenant; "" is the tenant without a name

    def add(self, request: EngineRequest) -> None:
        self._waiting[request.number] = request
        self._num_tokens[request.namespace.tenant] += request.num_prompt

    def forget(self, number: int) -> None:
        """Stop counting a request, if it still waits."""
        if (request := self._waiting.pop(number, None)) is not None:
            tenant = request.namespace.tenant
            self._num_tokens[tenant] -= request.num_prompt
            if not self._num_tokens[tenant]:
                del self._num_tokens[tenant]

    @property
    def num_tokens(self) -> int:
        """Number of waiting prompt tokens of all tenants."""
        self._update()
        return self._num_tokens.total()

    def num_tokens_of(self, tenant: str) -> int:
        """Number of a tenant's waiting prompt tokens."""
        self._update()
        return self._num_tokens[tenant]

    def _update(self) -> None:
        begun = self._gauges().prompts_left
        if begun is not self._begun:
            self._begun = begun
            for number in self._waiting.keys() & begun.keys():
                self.forget(number)
