from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .image import PromptImage
from .outputs import Delta
from .sampling_params import SamplingParams

_NUMBERS = itertools.count()
_VARIANT = b"\xff"  # invalid in UTF-8, so clients cannot send it


class CacheNamespace(NamedTuple):
    """Requests share cached pages only if their namespaces are equal."""

    tenant: str = ""
    salt: bytes = b""
    variant: bytes = b""

    @property
    def page_salt(self) -> bytes:
        return self.salt + _VARIANT + self.variant if self.variant else self.salt


NO_NAMESPACE = CacheNamespace()


def salt_and_variant(own: bytes) -> tuple[bytes, bytes]:
    salt, _, variant = own.partition(_VARIANT)
    return salt, variant


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EngineRequest:
    """A validated request. ``number`` is unique; request ids may be reused."""

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


class EngineOutput(NamedTuple):
    number: int
    delta: Delta
