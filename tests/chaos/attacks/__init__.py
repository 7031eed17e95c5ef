"""Attacks by clients, one file each; ``ATTACKS`` has them by name, in the order in which they run."""

from __future__ import annotations

from ..attack import Attack
from . import (
    ambiguous_grammars,
    cancelled_requests,
    contradictory,
    costly_masks,
    distinct_prompts,
    fill_pool,
    giant_ids,
    giant_texts,
    http_bodies,
    http_clients,
    http_states,
    idle_calls,
    idle_cpu,
    many_connections,
    many_fields,
    many_pins,
    many_samples,
    prompt_scores,
    queue_flood,
    rapid_resets,
    raw_resets,
    rerank_copies,
    resumed_states,
    rule_chains,
    saves,
    scrapers,
    silent_connections,
    slow_grammars,
    slow_readers,
    spent_grammars,
    statistics_flood,
    unauthenticated,
    watchers,
)

_MODULES = (
    rule_chains,
    slow_grammars,
    ambiguous_grammars,
    costly_masks,
    many_samples,
    many_pins,
    giant_texts,
    giant_ids,
    unauthenticated,
    slow_readers,
    rapid_resets,
    statistics_flood,
    watchers,
    queue_flood,
    cancelled_requests,
    contradictory,
    silent_connections,
    http_clients,
    saves,
    rerank_copies,
    many_fields,
    raw_resets,
    idle_calls,
    prompt_scores,
    scrapers,
    spent_grammars,
    http_bodies,
)
_HELPERS = (idle_cpu, distinct_prompts, fill_pool)  # no attacks: what other phases run beside the honest load

BY_CLIENTS: tuple[Attack, ...] = (
    *(module.ATTACK for module in _MODULES),
    resumed_states.MEMORY,
    resumed_states.DISK,
    http_states.ATTACK,
    many_connections.ATTACK,
)
ATTACKS: dict[str, Attack] = {
    attack.name: attack for attack in (*BY_CLIENTS, *(module.ATTACK for module in _HELPERS))
}
