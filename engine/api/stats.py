"""Statistics of one step for observers (metrics, progress bars)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

from octavo.block_manager import PageCounts

from .outputs import FinishReason
from .store_counters import StoreCounts, SwapCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request that has ended, with all samples; times are in seconds. ``invalid``: the request failed
    because of its own parameters, not because of the model or the engine."""

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
    """Draft tokens of one sequence in one step: how many were computed, and how many of these accepted."""

    num_drafts: int
    num_accepted: int


class TenantLoad(NamedTuple):
    """Numbers of one tenant's running and waiting sequences."""

    running: int
    waiting: int


class TenantTokens(NamedTuple):
    """Tokens of one tenant in one step: computed prompt tokens, and generated tokens."""

    prompt: int
    output: int


class AdapterLoad(NamedTuple):
    """Largest number of adapters in a step, and names of adapters with running and with waiting requests."""

    max_loras: int
    running: tuple[str, ...]
    waiting: tuple[str, ...]


NO_TENANTS: Mapping[str, TenantLoad] = MappingProxyType({})
NO_PROMPTS: Mapping[int, int | None] = MappingProxyType({})


class Gauges(NamedTuple):
    """Current gauges of the engine, in a named tuple because one is made after every step.

    residual      16-bit pages next to quantized ones
    states        slots of recurrent layers
    store, swap   pages on disk and in ``swap_memory``, if the engine has these
    pages_pinned  pages held by pins
    tenants       loads of named tenants, at most a second old
    prompts_left  number of a request that has begun -> prompt tokens still to compute; None if the request
                  was preempted before its first token
    adapters      adapters in use, if the engine may have some
    """

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
    prompts_left: Mapping[int, int | None] = NO_PROMPTS
    adapters: AdapterLoad | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Record of one step: its work, its time, and its events.

    hit_tokens, query_tokens   prompt tokens found, and looked up, in this step
    miss_tokens                not found, by reason: "new", "last_token", "partial_page", "disabled", ...
    ttft_s, inter_token_s, queue_s   one entry per event of this step
    drafts                     one entry per sequence with drafts in this step
    tenant_tokens              tokens of each tenant with a name
    predicted_s                seconds that the scheduler expected; None without a latency target
    """

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


class Observer(Protocol):
    """Receiver of statistics. It is called on the engine thread, must be quick and must not raise."""

    def step(self, record: StepRecord) -> None: ...

    def rejected(self, reason: str) -> None:
        """Called when a request is refused on arrival: "too_long", "invalid", "overloaded", ..."""
        ...
