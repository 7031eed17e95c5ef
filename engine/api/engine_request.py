"""The data that cross between the front end and the engine: requests one way, news of them the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .outputs import Delta
from .sampling_params import SamplingParams

_NUMBERS = itertools.count()
_VARIANT = b"\xff"  # no UTF-8, so no salt of a client has it


class CacheNamespace(NamedTuple):
    """The owner of cached pages: only requests of one namespace share them.

    tenant    the client the request is served for, where several share a server
    salt      keeps requests of one tenant apart, by bytes of its own
    variant   names whatever else changes K/V for equal tokens, as an adapter does
    """

    tenant: str = ""
    salt: bytes = b""
    variant: bytes = b""

    @property
    def page_salt(self) -> bytes:
        """The salt that names pages. It begins with ``salt``, by which tenants are kept apart."""
        return self.salt + _VARIANT + self.variant if self.variant else self.salt


NO_NAMESPACE = CacheNamespace()


def salt_and_variant(own: bytes) -> tuple[bytes, bytes]:
    """Split a page's salt, without its tenant's, into the salt of the request and the variant."""
    salt, _, variant = own.partition(_VARIANT)
    return salt, variant


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EngineRequest:
    """A request that was checked and can be queued: plain data, which can be pickled.

    number       names the request for as long as its front end lives; ids may be used again
    prompt_ids   the prompt's tokens
    max_tokens   tokens each sample may generate, the model's length taken into account
    arrived_at   seconds of the machine's monotonic clock
    grammar      ticket of its compiled grammar, see ``GrammarDesk``
    adapter      name of the adapter it is computed with, whose digest is in its namespace
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int
    arrived_at: float
    namespace: CacheNamespace = NO_NAMESPACE
    priority: int = 0
    grammar: int | None = None
    adapter: str | None = None
    number: int = field(default_factory=_NUMBERS.__next__)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def skips_prefix_cache(self) -> bool:
        """Whether every token of the prompt has to be computed, cached or not."""
        return self.params.prompt_logprobs is not None or self.params.pooling == "mean"


class News(NamedTuple):
    """The latest output of the request with this number."""

    number: int
    delta: Delta
