from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from octavo.block_manager import FullAttention, RecurrentState
from serving import Served, check_outputs
from strategies import Event, Request, Workload, workloads

pytestmark = pytest.mark.property


@given(workloads())
def test_served_together_equals_served_alone(workload: Workload) -> None:
    check_outputs(Served(workload).run())


@given(workloads(kinds=()))
def test_without_pressure_all_outputs_are_complete(workload: Workload) -> None:
    served = Served(workload).run()
    assert not served.harmed
    check_outputs(served)


@given(workloads())
def test_lookups_account_for_every_prompt_token(workload: Workload) -> None:
    served = Served(workload).run()
    assert len({lookup.sequence for lookup in served.lookups}) == len(served.lookups), "looked up twice"
    for lookup in served.lookups:
        assert lookup.num_tokens == lookup.sequence.num_prompt
        assert lookup.num_hit + sum(lookup.misses.values()) == lookup.num_tokens
        assert all(count > 0 for count in lookup.misses.values())
        assert lookup.num_hit == lookup.sequence.history.num_cached
        assert lookup.num_hit < lookup.num_tokens
        assert workload.prefix_cache or lookup.misses == {"disabled": lookup.num_tokens}


@given(workloads())
def test_in_a_large_pool_every_full_page_is_found_again(workload: Workload) -> None:
    """Safety tests alone would pass with a cache that never hits."""
    groups = tuple(replace(group, num_pages=200) for group in workload.groups)
    states = None if workload.states is None else replace(workload.states, num_slots=200, every_page=True)
    served = Served(replace(workload, groups=groups, prefix_cache=True, states=states)).run()
    size = workload.page_size
    for sequence in served.everyone:
        if any(sequence in samples and served.harmed & set(samples) for samples in served.sequences):
            continue  # pages shared with a failed parallel sample are not published
        found = served.blocks.open(sequence.tokens, salt=sequence.salt)
        assert found.num_written == (len(sequence.tokens) - 1) // size * size
    assert served.blocks.num_evicted == 0
    assert served.scheduler.num_preemptions == 0


@pytest.mark.parametrize("num_aborted", [1, 2])
def test_a_sample_continues_from_its_aborted_parents_state(num_aborted: int) -> None:
    workload = Workload(
        page_size=4,
        groups=(FullAttention(num_pages=20),),
        max_running=4,
        max_step_tokens=10,
        arrivals_per_step=1,
        requests=(Request((1, 2, 3, 4) * 6, max_tokens=(2, 2, 2)),),
        events=tuple(Event("abort_in_flight", 2, 0, sample, 1) for sample in range(num_aborted)),
        prefix_cache=True,
        states=RecurrentState(num_slots=20, slot_bytes=1),
    )
    served = Served(workload).run()
    check_outputs(served)
    assert served.num_steps < 6, "nothing is computed again"


@given(workloads())
def test_overlapped_steps_do_not_change_outputs(workload: Workload) -> None:
    check_outputs(Served(workload, overlaps=True).run())


@given(workloads(kinds=()))
def test_steps_of_decodes_alone_are_planned_ahead(workload: Workload) -> None:
    """Safety tests alone would pass with a scheduler that never plans ahead."""
    groups = tuple(replace(group, num_pages=200) for group in workload.groups)
    workload = replace(workload, groups=groups, states=None, drafts=0)
    served = Served(workload, overlaps=True).run()
    check_outputs(served)
    forks = any(len(request.max_tokens) > 1 for request in workload.requests)
    longest = max(len(sequence.tokens) - sequence.num_prompt for sequence in served.everyone)
    if len(workload.requests) == 1 and not forks and longest > 2:
        assert served.num_ahead > 0
