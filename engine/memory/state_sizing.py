"""How many slots of recurrent state a model gets. No MLX."""

from __future__ import annotations

from octavo.block_manager import RecurrentState

from ..api.config import EngineConfig
from ..api.errors import InvalidConfig
from .budget import DEFAULT_KV_MEMORY, format_size

MIN_SLOTS = 2  # one that runs, and a snapshot


def plan_states(
    config: EngineConfig, slot_bytes: int, *, page_bytes: int, available: int
) -> RecurrentState | None:
    """The slots of a model whose state takes ``slot_bytes`` per sequence; None if it has none.

    ``state_memory`` decides if given. Otherwise: a slot for each running sequence and as many for
    snapshots, within half of ``kv_memory``, or of what stands for it. Where a slot is no bigger than a page
    (``page_bytes``), every page of the pool may have one. InvalidConfig if there is no room for two.
    """
    if not slot_bytes:
        return None
    budget = config.kv_memory or min(DEFAULT_KV_MEMORY, available // 4)
    every_page = slot_bytes <= page_bytes
    if config.state_memory is not None:
        budget, source, num_slots = config.state_memory, "state_memory", config.state_memory // slot_bytes
    else:
        budget, source = budget // 2, "half of the memory for K/V and states"
        wanted = 2 * config.max_running
        if every_page:
            wanted = max(wanted, config.max_running + (config.num_pages or budget // page_bytes))
        num_slots = min(wanted, budget // slot_bytes)
    if num_slots < MIN_SLOTS:
        raise InvalidConfig(
            f"{source} is {format_size(budget)}, but the recurrent state of one sequence takes "
            f"{format_size(slot_bytes)}, and there must be room for {MIN_SLOTS}; give more with state_memory"
        )
    if num_slots * slot_bytes > available:
        raise InvalidConfig(
            f"{num_slots} slots of recurrent state take {format_size(num_slots * slot_bytes)}, but only "
            f"{format_size(available)} are available; lower state_memory"
        )
    return RecurrentState(num_slots=num_slots, slot_bytes=slot_bytes, every_page=every_page)
