"""Data that cross between front end and engine: requests in one direction, outputs in the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .image import PromptImage
from .outputs import Delta
from .sampling_params import SamplingParams

_NUMBERS = itertools.count()
_VARIANT = b"\xff"  # separates salt and variant; not valid UTF-8, so clients cannot send it


class CacheNamespace(NamedTuple):
    """The owner of cached pages: only requests of the same namespace share pages.

    tenant    tenant of the request, if several share a server
    salt      bytes that keep requests of one tenant apart
    variant   name of anything else that changes K and V for equal tokens, such as an adapter
    """

    tenant: str = ""
    salt: bytes = b""
    variant: bytes = b""

    @property
    def page_salt(self) -> bytes:
        """The salt of page digests. It begins with ``salt``, which keeps tenants apart."""
        return self.salt + _VARIANT + self.variant if self.variant else self.salt


NO_NAMESPACE = CacheNamespace()


def salt_and_variant(own: bytes) -> tuple[bytes, bytes]:
    """Split a page's salt, without the tenant's prefix, into the salt of the request and the variant."""
    salt, _, variant = own.partition(_VARIANT)
    return salt, variant


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EngineRequest:
    """A checked request that can be queued: plain data, which can be pickled.

    number       unique in the life of a front end; request ids may be reused
    prompt_ids   the prompt's tokens
    max_tokens   maximum number of tokens per sample, within the model's length
    arrived_at   seconds of the machine's monotonic clock
    grammar      ticket for the compiled grammar, see ``GrammarDesk``
    adapter      name of the adapter, whose digest is in the namespace
    images       images of the prompt, by position
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
    images: tuple[PromptImage, ...] = ()
    number: int = field(default_factory=_NUMBERS.__next__)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)


class News(NamedTuple):
    """The latest output of the request with this number."""

    number: int
    delta: Delta
