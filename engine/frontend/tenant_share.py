"""Shares of the queue, so that one tenant's requests cannot fill it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from ..api import config as settings
from ..api.config import EngineConfig
from ..api.errors import Overloaded
from ..api.tenant import Tenant
from .waiting_prompts import WaitingPrompts


class TenantShares:
    """The unfinished requests of each tenant, and limits on them. Lives on the event loop.

    A tenant may have its share of unfinished requests and of waiting prompt tokens even while others are
    idle, so that their next requests find a place.
    """

    def __init__(self, config: EngineConfig, waiting: WaitingPrompts) -> None:
        self._waiting = waiting
        self._max_requests = config.max_running + config.max_waiting
        self._max_tokens = settings.MAX_WAITING_TOKENS
        self._num_samples: Counter[str] = Counter()  # samples of unfinished requests, by tenant

    @contextlib.contextmanager
    def entered(self, tenant: Tenant, num_samples: int) -> Iterator[None]:
        """Count an unfinished request, once for each sample, until the block ends. Raises Overloaded if its
        tenant exceeds its share. A tenant's only request is admitted with any number of samples."""
        count = self._num_samples[tenant.name]
        most = tenant.part_of(self._max_requests)
        if tenant.share < 1 and count and count + num_samples > most:
            raise Overloaded(
                f"{count} requests of this tenant are unfinished (each sample counts), but at most {most} "
                f"may be, its share of {self._max_requests} (tenant_share); try again later",
                unfinished_requests=count,
                max_unfinished_requests=most,
            )
        self._num_samples[tenant.name] += num_samples
        try:
            yield
        finally:
            self._num_samples[tenant.name] -= num_samples
            if not self._num_samples[tenant.name]:
                del self._num_samples[tenant.name]

    def check_tokens(self, tenant: Tenant, num_prompt: int) -> None:
        """Raise Overloaded if ``num_prompt`` more prompt tokens exceed the tenant's share. A tenant's only
        waiting prompt is admitted whatever its length."""
        if tenant.share >= 1:
            return
        waiting = self._waiting.num_tokens_of(tenant.name)
        most = tenant.part_of(self._max_tokens)
        if waiting and waiting + num_prompt > most:
            raise Overloaded(
                f"{waiting} prompt tokens of this tenant are waiting, and the {num_prompt} of this request "
                f"would exceed {most}, its share of {self._max_tokens} (tenant_share); "
                "try again later",
                waiting_tokens=waiting,
                max_waiting_tokens=most,
            )
