from __future__ import annotations

from octavo.block_manager import RecurrentState

from ..api.config import MAX_DRAFTS, EngineConfig
from ..api.errors import InvalidConfig
from .budget import DEFAULT_KV_MEMORY, format_size

MIN_SLOTS = 2
NUM_DRAFTING = 8  # sequences whose drafts get state slots
NUM_GUESSED_FOR = 4  # sequences with state slots in the draft model
TOKENS_OF_A_TURN = 512  # tokens of a short turn of a conversation
TOKENS_PER_SNAPSHOT = 16_384  # tokens of K and V per snapshot


def plan_states(
    config: EngineConfig,
    slot_bytes: int,
    *,
    page_bytes: int,
    available: int,
) -> RecurrentState | None:
    """Return the slots of a model with ``slot_bytes`` of state per sequence; None for models without states.

    Without ``state_memory``, each running sequence has one slot and one snapshot. All slots take at most
    half of ``kv_memory``. Raises InvalidConfig if two slots do not fit.
    """
    if not slot_bytes:
        return None
    budget = config.kv_memory or min(DEFAULT_KV_MEMORY, available // 4)
    every_page = slot_bytes <= page_bytes
    if config.state_memory is not None:
        budget, source = config.state_memory, "state_memory"
        wanted = budget // slot_bytes
    else:
        balanced = _num_conversations(config, budget, slot_bytes, page_bytes)
        budget, source = budget // 2, "half of the memory for K/V and states"
        wanted = max(2 * config.max_running, balanced) + _num_drafts(config)
        if every_page:
            pages = config.num_pages or budget // page_bytes
            wanted = max(wanted, config.max_running + pages + _num_drafts(config))
    num_slots = min(wanted, budget // slot_bytes)
    if num_slots < MIN_SLOTS:
        raise InvalidConfig(
            f"{source} is {format_size(budget)}, but the recurrent state of one sequence takes "
            f"{format_size(slot_bytes)}, and at least {MIN_SLOTS} states must fit; raise state_memory"
        )
    states = RecurrentState(
        num_slots=num_slots,
        slot_bytes=slot_bytes,
        every_page=every_page,
        page_bytes=page_bytes,
        turn_pages=-(-TOKENS_OF_A_TURN // config.page_size),
    )
    if states.nbytes > available:
        raise InvalidConfig(
            f"{states.num_slots} slots of recurrent state take {format_size(states.nbytes)}, but only "
            f"{format_size(available)} are available; lower state_memory"
        )
    return states


def draft_state_bytes(config: EngineConfig, slot_bytes: int) -> int:
    """Return the bytes of a draft model's recurrent states."""
    return (1 + MAX_DRAFTS) * min(config.max_running, NUM_GUESSED_FOR) * slot_bytes


def _num_conversations(config: EngineConfig, num_bytes: int, snapshot_bytes: int, page_bytes: int) -> int:
    if config.num_pages is not None:
        return config.num_pages * config.page_size // TOKENS_PER_SNAPSHOT
    kv_bytes = TOKENS_PER_SNAPSHOT * page_bytes // config.page_size
    return num_bytes // (snapshot_bytes + kv_bytes) if kv_bytes else 0


def _num_drafts(config: EngineConfig) -> int:
    drafts = config.speculate not in ("off", "auto")
    return MAX_DRAFTS * min(config.max_running, NUM_DRAFTING) if drafts else 0
