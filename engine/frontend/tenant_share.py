"""Shares of the queue, so that the tenant that sends most leaves room for the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ..api import config as settings
from ..api.config import EngineConfig
from ..api.engine_request import EngineRequest
from ..api.errors import Overloaded
from ..api.stats import Gauges
from ..api.tenant import Tenant


class TenantPlace:
    """Place of one request among its tenant's, from ``enter`` on."""

    def __init__(self, shares: TenantShares, tenant: Tenant) -> None:
        self._shares = shares
        self.tenant = tenant
        self.num_samples = 0
        self.request: EngineRequest | None = None  # once its prompt is encoded

    @property
    def num_waiting_tokens(self) -> int:
        """Number of its prompt's tokens, until the prompt is begun."""
        request = self.request
        return 0 if request is None or self._shares.has_begun(request) else request.num_prompt

    def enter(self, num_samples: int) -> None:
        """Count this request, once for each sample. Overloaded if its tenant has too much of the queue."""
        self._shares.check_requests(self.tenant, num_samples)
        self.num_samples = num_samples
        self._shares.add(self)

    def admit(self, request: EngineRequest) -> None:
        """Count the prompt's tokens. Overloaded if its tenant has its share already."""
        self._shares.check_tokens(self.tenant, request.num_prompt)
        self.request = request


class TenantShares:
    """The unfinished requests of each tenant. A tenant may have its share of the requests that may be
    unfinished and of the prompt tokens that may wait, whether others want theirs or not: otherwise there
    would be no room when they come. Lives on the event loop."""

    def __init__(self, config: EngineConfig, gauges: Callable[[], Gauges]) -> None:
        self._gauges = gauges
        self._max_requests = config.max_running + config.max_waiting
        self._max_tokens = settings.MAX_WAITING_TOKENS
        self._places: dict[str, set[TenantPlace]] = {}

    @contextlib.contextmanager
    def place(self, tenant: Tenant) -> Iterator[TenantPlace]:
        """A place that may be entered, and is given up when the block ends."""
        place = TenantPlace(self, tenant)
        try:
            yield place
        finally:
            places = self._places.get(tenant.name, set())
            places.discard(place)
            if not places:
                self._places.pop(tenant.name, None)

    def has_begun(self, request: EngineRequest) -> bool:
        return request.number in self._gauges().prompts_left

    def add(self, place: TenantPlace) -> None:
        self._places.setdefault(place.tenant.name, set()).add(place)

    def check_requests(self, tenant: Tenant, num_samples: int) -> None:
        """Overloaded if one more unfinished request of so many samples is too much.

        One that is its tenant's only one is let in however many samples it has."""
        count = sum(place.num_samples for place in self._places.get(tenant.name, ()))
        most = tenant.part_of(self._max_requests)
        if tenant.share < 1 and count and count + num_samples > most:
            raise Overloaded(
                f"{count} requests of this tenant are unfinished, each sample counted, and at most {most} "
                f"may be, which is its share of {self._max_requests} (tenant_share); try again later",
                unfinished_requests=count,
                max_unfinished_requests=most,
            )

    def check_tokens(self, tenant: Tenant, num_prompt: int) -> None:
        """Overloaded if so many prompt tokens more are too much. A prompt that none of its tenant's waits
        before is let in however long it is."""
        if tenant.share >= 1:
            return
        waiting = sum(place.num_waiting_tokens for place in self._places.get(tenant.name, ()))
        most = tenant.part_of(self._max_tokens)
        if waiting and waiting + num_prompt > most:
            raise Overloaded(
                f"{waiting} prompt tokens of this tenant are waiting, with the {num_prompt} of this request "
                f"there would be more than {most}, which is its share of {self._max_tokens} (tenant_share); "
                "try again later",
                waiting_tokens=waiting,
                max_waiting_tokens=most,
            )
