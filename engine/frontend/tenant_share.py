"""Shares of the queue, so that one tenant's requests cannot fill it."""

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
        self.request: EngineRequest | None = None  # set when its prompt is encoded

    @property
    def num_waiting_tokens(self) -> int:
        """Number of prompt tokens of the request, until its first step."""
        request = self.request
        return 0 if request is None or self._shares.has_begun(request) else request.num_prompt

    def enter(self, num_samples: int) -> None:
        """Count this request, once for each sample. Raises Overloaded if its tenant exceeds its share of the
        queue."""
        self._shares.check_requests(self.tenant, num_samples)
        self.num_samples = num_samples
        self._shares.add(self)

    def admit(self, request: EngineRequest) -> None:
        """Count the prompt's tokens. Raises Overloaded if its tenant exceeds its share."""
        self._shares.check_tokens(self.tenant, request.num_prompt)
        self.request = request


class TenantShares:
    """The unfinished requests of each tenant. Lives on the event loop.

    A tenant may have its share of unfinished requests and of waiting prompt tokens even while others are
    idle, so that their next requests find a place.
    """

    def __init__(self, config: EngineConfig, gauges: Callable[[], Gauges]) -> None:
        self._gauges = gauges
        self._max_requests = config.max_running + config.max_waiting
        self._max_tokens = settings.MAX_WAITING_TOKENS
        self._places: dict[str, set[TenantPlace]] = {}

    @contextlib.contextmanager
    def place(self, tenant: Tenant) -> Iterator[TenantPlace]:
        """Return a place that may be entered, and is left when the block ends."""
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
        """Raise Overloaded if one more request with ``num_samples`` samples exceeds the tenant's share.

        A tenant's only request is admitted with any number of samples.
        """
        count = sum(place.num_samples for place in self._places.get(tenant.name, ()))
        most = tenant.part_of(self._max_requests)
        if tenant.share < 1 and count and count + num_samples > most:
            raise Overloaded(
                f"{count} requests of this tenant are unfinished (each sample counts), but at most {most} "
                f"may be, its share of {self._max_requests} (tenant_share); try again later",
                unfinished_requests=count,
                max_unfinished_requests=most,
            )

    def check_tokens(self, tenant: Tenant, num_prompt: int) -> None:
        """Raise Overloaded if ``num_prompt`` more prompt tokens exceed the tenant's share. A tenant's only
        waiting prompt is admitted whatever its length."""
        if tenant.share >= 1:
            return
        waiting = sum(place.num_waiting_tokens for place in self._places.get(tenant.name, ()))
        most = tenant.part_of(self._max_tokens)
        if waiting and waiting + num_prompt > most:
            raise Overloaded(
                f"{waiting} prompt tokens of this tenant are waiting, and the {num_prompt} of this request "
                f"would exceed {most}, its share of {self._max_tokens} (tenant_share); "
                "try again later",
                waiting_tokens=waiting,
                max_waiting_tokens=most,
            )
