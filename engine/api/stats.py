from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from octavo.block_manager import PageCounts

from .outputs import FinishReason
from .store_counters import StoreCounts, SwapCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A finished request with all its samples. Times are in seconds."""

    request_id: str
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queue_s: float
    ttft_s: float | None
    total_s: float
    invalid: bool = False


class DraftRecord(NamedTuple):
    num_drafts: int
    num_accepted: int


class TenantLoad(NamedTuple):
    running: int
    waiting: int


class TenantTokens(NamedTuple):
    """Prompt tokens and generated tokens of one tenant in one step."""

    prompt: int
    output: int


class AdapterLoad(NamedTuple):
    max_loras: int
    running: tuple[str, ...]
    waiting: tuple[str, ...]


NO_TENANTS: Mapping[str, TenantLoad] = {}


class Gauges(NamedTuple):
    """Gauges after a step. ``tenants`` may be a second old; ``begun`` are numbers of requests."""

    num_running: int = 0
    num_waiting: int = 0
    pages_held: int = 0
    pages_idle_cached: int = 0
    pages_idle_empty: int = 0
    residual: PageCounts | None = None
    states: PageCounts | None = None
    store: StoreCounts | None = None
    swap: SwapCounts | None = None
    tenants: Mapping[str, TenantLoad] = NO_TENANTS
    pages_pinned: int = 0
    begun: frozenset[int] = frozenset()
    adapters: AdapterLoad | None = None
    media_waits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Statistics of one step. ``predicted_s`` is None without a latency target."""

    seconds: float
    prefill_tokens: int
    decode_tokens: int
    generated_tokens: int
    preemptions: int
    evicted_pages: int
    query_tokens: int
    hit_tokens: int
    gauges: Gauges
    miss_tokens: Mapping[str, int] = field(default_factory=dict)
    ttft_s: tuple[float, ...] = ()
    inter_token_s: tuple[float, ...] = ()
    queue_s: tuple[float, ...] = ()
    ended: tuple[RequestRecord, ...] = ()
    drafts: tuple[DraftRecord, ...] = ()
    tenant_tokens: Mapping[str, TenantTokens] = field(default_factory=dict)
    predicted_s: float | None = None
    encoded_s: tuple[float, ...] = ()
    image_hits: int = 0


class Observer(Protocol):
    """Receiver of statistics. Its methods run on the engine thread and must not raise."""

    def step(self, record: StepRecord) -> None: ...

    def rejected(self, reason: str) -> None: ...
