from __future__ import annotations

import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.block_manager import BlockManager
from octavo.scheduler import Limits, Scheduler, Sequence, Status
from octavo.scheduler.types import ScheduledChunk
from octavo.scheduler.waiting import DEFAULT_QUANTUM, WaitingQueue
from octavo.scheduler.waiting.line import MAX_OVERTAKEN
from steps import advance, names, plan


def scheduler(
    queue: WaitingQueue | None = None, *, num_pages: int = 64, budget: int = 16, running: int = 4
) -> Scheduler:
    queue = WaitingQueue(weights={}) if queue is None else queue
    return Scheduler(BlockManager(num_pages, 4), Limits(budget, running), waiting=queue)


def scheduler_of(blocks: BlockManager, kind: str) -> Scheduler:
    queue = (
        WaitingQueue(blocks, {}, quantum=1e9) if kind == "dlpm" else WaitingQueue(weights={}, quantum=16.0)
    )
    return Scheduler(blocks, Limits(16, 4), waiting=queue)


def fair(s: Scheduler) -> WaitingQueue:
    return s._queues.waiting


def request(
    name: str, length: int = 8, max_tokens: int = 1, *, tenant: str = "", priority: int = 0
) -> Sequence:
    """Return a request; its tenant is the first letter of the name by default."""
    prompt = [zlib.crc32(name.encode()), *range(length - 1)]
    return Sequence(name, prompt, max_tokens, tenant=tenant or name[0], priority=priority)


def served(s: Scheduler) -> list[str]:
    order: dict[str, None] = {}
    while s.has_work:
        order.update(dict.fromkeys(names(advance(s))))
    return list(order)


def test_tenants_take_turns_though_one_came_first() -> None:
    s = scheduler(running=1)
    for name in ("a1", "a2", "a3", "b1", "b2"):
        s.add(request(name))
    assert served(s) == ["a1", "b1", "a2", "b2", "a3"]


def test_a_weight_of_two_gets_two_turns() -> None:
    s = scheduler(WaitingQueue(weights={"b": 2.0}), running=1)
    for name in ("a1", "a2", "a3", "b1", "b2", "b3", "b4"):
        s.add(request(name))
    assert served(s) == ["a1", "b1", "b2", "a2", "b3", "b4", "a3"]


def test_prompts_count_once_and_outputs_as_two() -> None:
    s = scheduler()
    s.add(request("a", 8, max_tokens=3))
    advance(s)
    assert fair(s).service_of("a") == 8 + 2
    advance(s)
    assert fair(s).service_of("a") == 8 + 4


def test_counters_include_sampled_tokens_at_once() -> None:
    queue, runs, equal = WaitingQueue(weights={}), request("a1"), request("a2")
    queue.append(runs)
    queue.on_planned(ScheduledChunk(runs, 0, 8, True))
    queue.remove(runs)
    queue.append(equal)
    runs.tokens.append(7)
    queue.on_computed([ScheduledChunk(runs, 0, 8, True)])
    queue.append(request("b1"))
    queue.on_planned(ScheduledChunk(request("b2"), 0, 1, False))
    assert next(queue.admission_order()) is equal, "b was lifted to 8 + 2, and has had one token more"
    assert queue.service_of("b") == 8 + 2 + 1
    runs.tokens.append(7)
    queue.on_computed([ScheduledChunk(runs, 8, 9, True)])
    assert next(queue.admission_order()) is not equal, "now it has 8 + 4"


def test_samples_share_a_prompt_and_pay_for_each_token() -> None:
    s = scheduler()
    first, *others = (request("a", 8, max_tokens=2) for _ in range(3))
    first.parallel_samples = others
    s.add(first)
    advance(s)
    assert fair(s).service_of("a") == 8 + 3 * 2
    advance(s)
    assert fair(s).service_of("a") == 8 + 6 * 2


def test_an_abort_in_flight_is_charged_for_computed_tokens() -> None:
    s = scheduler(budget=8)
    sequence = request("a", 20)
    s.add(sequence)
    step = plan(s)
    s.abort(sequence)
    s.commit(step, [])
    assert fair(s).service_of("a") == 8


def test_recomputed_tokens_are_not_charged_again() -> None:
    s = scheduler(num_pages=5)
    a, b = request("a", 8, 8), request("b", 8, 8)
    s.add(a)
    s.add(b)
    while not (a.status is b.status is Status.FINISHED):
        advance(s)
    assert s.num_preemptions
    assert fair(s).service_of("a") == fair(s).service_of("b") == 8 + 8 * 2


def test_the_most_served_tenant_is_preempted() -> None:
    s = scheduler(num_pages=9, budget=64)
    oldest, a, b = request("c", 4, 28), request("a", 8, 12), request("b", 4, 12)
    for sequence in (oldest, a, b):
        s.add(sequence)
    while not s.num_preemptions:
        advance(s)
    assert fair(s).service_of("a") > fair(s).service_of("b")
    assert (a.status, b.status) == (Status.WAITING, Status.RUNNING), "a is older and has had more"


def test_a_returning_tenants_counter_rises_to_the_least_waiting() -> None:
    s = scheduler(running=1)
    for number in range(6):
        s.add(request(f"a{number}"))
    for number in range(6):
        s.add(request(f"b{number}"))
    for _ in range(6):
        advance(s)
    s.add(request("c0"))
    s.add(request("c1"))
    assert fair(s).service_of("c") == min(fair(s).service_of("a"), fair(s).service_of("b")) > 0
    order = served(s)
    assert order.index("c1") > 2, "what c did not use is not saved up"


def test_head_starts_do_not_add_up() -> None:
    s = scheduler(WaitingQueue(weights={}, quantum=8.0), running=1)
    for number in range(4):
        s.add(request(f"a{number}"))
        s.add(request(f"b{number}"))
    for _ in range(4):
        advance(s)
    level = min(fair(s).service_of("a"), fair(s).service_of("b"))
    for name in "cdefg":
        s.add(request(name))
    assert [fair(s).service_of(name) for name in "cdefg"] == [level - 8] * 5


def test_priorities_have_separate_counters() -> None:
    s = scheduler(running=1)
    s.add(request("a1", priority=1))
    s.add(request("b1", priority=1))
    s.add(request("a2"))
    s.add(request("a3"))
    assert served(s) == ["a2", "a3", "a1", "b1"]
    assert fair(s).service_of("a") == 20
    assert fair(s).service_of("a", 1) == 10, "nothing of what a2 and a3 took"


def test_a_running_prompt_yields_the_step_to_less_served_tenants() -> None:
    s = scheduler(budget=16)
    s.add(request("along", 60))
    advance(s)
    for name, expected in (("bfirst", {"bfirst": 10}), ("bsecond", {"bsecond": 10, "along": 6})):
        s.add(request(name, 10))
        step = advance(s)
        assert {work.sequence.sequence_id: work.stop - work.start for work in step.work} == expected
        assert names(advance(s)) == ["along"]


@pytest.mark.parametrize("kind", ["vtc", "dlpm"])
def test_a_running_long_prompt_delays_no_other_tenant(kind: str) -> None:
    blocks = BlockManager(64, 4)
    s = scheduler_of(blocks, kind)
    s.add(request("along1", 60))
    s.add(request("along2", 60))
    advance(s)
    s.add(request("blong", 20))
    assert names(advance(s)) == ["blong"]


@pytest.mark.parametrize("kind", ["lpm", "dlpm"])
def test_prompts_with_cached_tokens_come_first(kind: str) -> None:
    blocks = BlockManager(64, 4)
    queue = WaitingQueue(blocks) if kind == "lpm" else WaitingQueue(blocks, {}, quantum=DEFAULT_QUANTUM)
    s = Scheduler(blocks, Limits(32, 1), waiting=queue)
    s.add(Sequence("first", [9] * 17, 1))
    advance(s)
    s.add(Sequence("cold", [1] * 17, 1))
    s.add(Sequence("half", [9] * 8 + [1] * 9, 1))
    s.add(Sequence("warm", [9] * 17, 1))
    assert served(s) == ["warm", "half", "cold"]


@pytest.mark.parametrize("kind", ["lpm", "dlpm"])
def test_the_oldest_is_overtaken_a_bounded_number_of_times(kind: str) -> None:
    blocks = BlockManager(64, 4)
    queue = WaitingQueue(blocks) if kind == "lpm" else WaitingQueue(blocks, {}, quantum=1e9)
    s = Scheduler(blocks, Limits(32, 1), waiting=queue)
    s.add(Sequence("first", [9] * 17, 1))
    advance(s)
    cold, successor = Sequence("cold", [1] * 17, 1), Sequence("successor", [1] * 17, 1)
    cold.parallel_samples = [successor]
    s.add(cold)
    overtaken = 0
    while successor.status is Status.WAITING:
        if overtaken == 3 and cold.status is Status.WAITING:
            s.abort(cold)
        s.add(Sequence("warm", [9] * 17, 1))
        overtaken += names(advance(s)) == ["warm"]
        assert overtaken <= MAX_OVERTAKEN
    assert overtaken == MAX_OVERTAKEN


def test_deficits_let_a_tenant_continue_for_a_quantum() -> None:
    blocks = BlockManager(64, 4)
    s = Scheduler(blocks, Limits(64, 1), waiting=WaitingQueue(blocks, {}, quantum=40))
    for number in range(4):
        for tenant in "ab":
            prompt = [ord(tenant)] * 16 + [number + 1] * 4
            s.add(Sequence(f"{tenant}{number}", prompt, 1, tenant=tenant))
    order = served(s)
    changes = sum(one[0] != other[0] for one, other in pairwise(order))
    assert changes < 6
    assert "b" in {name[0] for name in order[:5]}, "and it is another's turn after that"


def test_a_weight_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="the weight of tenant a must be above 0, got 0"):
        WaitingQueue(weights={"a": 0.0})


@given(
    quantum=st.floats(1e-9, 1e9) | st.sampled_from([5e-324, 0.001, 4096.1, 1.7e308]),
    cost=st.floats(1e-6, 1e11) | st.sampled_from([0.1, 1.1]),
    jobs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), min_size=2, max_size=12),
)
def test_any_quantum_and_any_cost_let_somebody_in(
    quantum: float, cost: float, jobs: list[tuple[str, int]]
) -> None:
    blocks = BlockManager(64, 4)
    weights = {"a": 1 / cost, "b": 0.7 / cost, "c": 1 / cost}
    s = Scheduler(blocks, Limits(16, 2), waiting=WaitingQueue(blocks, weights, quantum=quantum))
    everyone = [request(f"{tenant}{number}", length) for number, (tenant, length) in enumerate(jobs)]
    for each in everyone:
        s.add(each)
        if s.has_work:
            advance(s)
    served(s)
    assert all(each.status is Status.FINISHED for each in everyone)
