from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import grammar_bombs as bombs
from engines import Gate, running
from fakes import VOCAB_SIZE, byte_tokenizer
from octavo.block_manager import RecurrentState
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.output_collector import OutputCollector
from octavo.engine.api.outputs import Delta, FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.frontend.async_engine import AsyncEngine
from octavo.engine.structured_output import mask_budget, mask_threads
from octavo.engine.structured_output.compiler import ConstraintCompiler
from octavo.engine.structured_output.constraint import Constraint, ConstraintFailed
from octavo.engine.structured_output.mask_budget import BURST_S
from octavo.engine.structured_output.mask_threads import MAX_STUCK, NUM_THREADS, MaskLate, MaskThreads

ENDS = np.array([3])
NUM_TOKENS = 8


class Matcher:
    def __init__(self, gate: threading.Event | None = None, error: str = "") -> None:
        self.gate = gate
        self.error = error
        self.accepted: list[int] = []
        self.threads: set[str] = set()

    def compute_bitmask(self) -> bytes:
        self.threads.add(threading.current_thread().name)
        if self.gate is not None:
            assert self.gate.wait(30)
        if self.error == "panic":
            raise BaseException("panicked")
        return bytes([0b111])

    def is_error(self) -> bool:
        return bool(self.error)

    def get_error(self) -> str:
        return self.error

    def is_stopped(self) -> bool:
        return False

    def consume_token(self, token: int) -> bool:
        self.accepted.append(token)
        return True

    def deep_copy(self) -> Matcher:
        return Matcher(self.gate, self.error)


@pytest.fixture
def threads() -> Iterator[MaskThreads]:
    made = MaskThreads()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_threads, "MAX_WAIT_S", 60.0)


def give_up(own: Constraint, why: str = "regex could not be checked: it is too ambiguous") -> None:
    own.prepare()
    matcher: Any = own.matcher
    _until(lambda: bool(matcher.threads) or not own.threads._num_threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_threads, "MAX_WAIT_S", 0.05)
        with pytest.raises(ConstraintFailed, match=why):
            own.allowed()


def constraint(threads: MaskThreads, matcher: Matcher) -> Constraint:
    fake: Any = matcher
    return Constraint(fake, "regex", bits=None, threads=threads, vocab_size=NUM_TOKENS, end_ids=ENDS)


def test_masks_are_computed_on_other_threads_and_once(threads: MaskThreads) -> None:
    matcher = Matcher()
    own = constraint(threads, matcher)
    own.prepare()
    own.prepare()
    for _ in range(2):
        assert own.allowed().tolist() == [True] * 3 + [False] * 5
    assert matcher.threads == {"octavo-masks"}
    own.accept(1)
    assert own.allowed().any()
    assert matcher.accepted == [1]


def test_a_stuck_mask_fails_only_its_request(threads: MaskThreads) -> None:
    gate = threading.Event()
    stuck, other = constraint(threads, Matcher(gate)).copies(2)
    give_up(stuck)
    assert constraint(threads, Matcher()).allowed().any()
    assert other.is_stuck
    with pytest.raises(ConstraintFailed, match="checking it for another output was too costly"):
        other.allowed()
    gate.set()
    _until(lambda: not other.is_stuck and not threads.num_stuck)
    assert other.allowed().any(), "it had missed nothing"


def test_a_token_that_could_not_be_accepted_is_not_forgotten(threads: MaskThreads) -> None:
    gate = threading.Event()
    matcher = Matcher(gate)
    stuck, other = constraint(threads, matcher).copies(2)
    gate.set()
    other.allowed()
    gate.clear()
    give_up(stuck)
    other.accept(1)
    copied: Any = other.matcher
    assert copied.accepted == []
    gate.set()
    _until(lambda: not other.is_stuck)
    with pytest.raises(ConstraintFailed, match="another output"):
        other.allowed()


def test_stuck_threads_are_replaced_and_bounded(threads: MaskThreads) -> None:
    gate = threading.Event()
    most = NUM_THREADS + MAX_STUCK
    for _ in range(most + 3):
        give_up(constraint(threads, Matcher(gate)), r"too ambiguous|too many other masks are stuck")
    assert MAX_STUCK <= threads.num_stuck <= most
    with pytest.raises(ConstraintFailed, match="too many other masks are stuck"):
        constraint(threads, Matcher()).allowed()
    gate.set()
    _until(lambda: not threads.num_stuck)
    assert constraint(threads, Matcher()).allowed().any()


def test_errors_and_panics_of_the_library_are_the_requests_own(threads: MaskThreads) -> None:
    for error, shown in (("too many items\n<state>\nlong", "too many items$"), ("panic", "panicked")):
        with pytest.raises(ConstraintFailed, match=f"regex could not be checked: {shown}"):
            constraint(threads, Matcher(error=error)).allowed()
    assert constraint(threads, Matcher()).allowed().any()


def test_after_the_end_no_mask_is_waited_for(threads: MaskThreads) -> None:
    own = constraint(threads, Matcher())
    own.allowed()
    threads.close()
    _until(lambda: not threads._num_threads)
    own.accept(1)
    with pytest.raises(ConstraintFailed, match="the engine was stopped"):
        own.allowed()


class Rests(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.seconds.append(timeout)
        return self.is_set()


class Costly(Matcher):
    COST_S = 0.01

    def compute_bitmask(self) -> bytes:
        end = time.thread_time() + self.COST_S
        while time.thread_time() < end:
            pass
        return super().compute_bitmask()


def spent(threads: MaskThreads, matcher: Matcher) -> Constraint:
    own = constraint(threads, matcher)
    own.budget.charge(BURST_S + 0.001)
    return own


def test_a_request_that_has_spent_its_budget_waits_its_turn(threads: MaskThreads) -> None:
    threads._closed = rests = Rests()
    gate = threading.Event()
    first, second = Matcher(gate), Costly()
    waiting = [spent(threads, first), spent(threads, second)]
    for each in waiting:
        each.prepare()
    _until(lambda: bool(first.threads))
    for each in waiting:
        assert each.is_late
        with pytest.raises(MaskLate):
            each.allowed(may_be_late=True)
    for _ in range(3):
        assert constraint(threads, Matcher()).allowed().any(), "others are served meanwhile"
    assert not second.threads
    gate.set()
    _until(lambda: len(rests.seconds) == 2)
    assert not any(each.is_late for each in waiting)
    assert all(each.allowed(may_be_late=True).any() for each in waiting)
    assert rests.seconds[1] >= Costly.COST_S * (1 / mask_threads.SPENT_SHARE - 1)


def test_a_put_off_mask_of_an_ended_request_is_not_computed(threads: MaskThreads) -> None:
    gate = threading.Event()
    before, own, last = (spent(threads, matcher) for matcher in (Matcher(gate), Matcher(), Matcher()))
    for each in (before, own, last):
        each.prepare()
    own.drop()
    gate.set()
    assert last.allowed().any()
    assert before.allowed().any()
    matcher: Any = own.matcher
    assert not matcher.threads


def _until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


async def _whole(engine: AsyncEngine, params: SamplingParams, prompt: str = "x") -> dict[int, Delta]:
    collectors: dict[int, OutputCollector] = defaultdict(OutputCollector)
    async for delta in engine.generate(prompt, params):
        collectors[delta.index].add(delta)
    return {index: collector.take() for index, collector in collectors.items()}


@pytest.mark.parametrize("n", [1, 4])
async def test_an_ambiguous_grammar_waits_and_ends_whole(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mask takes a few hundred microseconds with this tokenizer, more than the budget."""
    honest = SamplingParams(max_tokens=150)
    params = SamplingParams(max_tokens=60, n=n, structured=bombs.AMBIGUOUS, ignore_eos=True)
    async with running() as (engine, _, _):
        quiet, alone = await _whole(engine, honest), await _whole(engine, params)
    for name in ("BURST_S", "TOKEN_S", "OTHER_TOKEN_S"):
        monkeypatch.setattr(mask_budget, name, getattr(mask_budget, name) / 200)
    put_off: list[bool] = []
    submit = MaskThreads.submit

    def noted(self: MaskThreads, job: mask_threads.MaskJob, *, may_defer: bool = False) -> None:
        submit(self, job, may_defer=may_defer)
        put_off.append(job.is_deferred or job.is_late)

    monkeypatch.setattr(MaskThreads, "submit", noted)
    async with running() as (engine, _, _):
        stream = asyncio.create_task(_whole(engine, honest))
        hostile = await _whole(engine, params)
        undisturbed = await stream
    assert any(put_off), "it has spent its budget"
    assert {at: (delta.token_ids, delta.finish_reason) for at, delta in hostile.items()} == {
        at: (delta.token_ids, delta.finish_reason) for at, delta in alone.items()
    }
    assert undisturbed[0].finish_reason is quiet[0].finish_reason is FinishReason.LENGTH
    assert undisturbed[0].token_ids == quiet[0].token_ids


def test_masks_of_requests_that_have_used_least_come_first() -> None:
    threads, gate, order = MaskThreads(), threading.Event(), list[str]()

    class Noted(Matcher):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def compute_bitmask(self) -> bytes:
            order.append(self.name)
            return super().compute_bitmask()

    busy = [constraint(threads, Matcher(gate)) for _ in range(NUM_THREADS)]
    for each in busy:
        each.prepare()
    costly = [constraint(threads, Noted(f"costly {number}")) for number in range(3)]
    for each in costly:
        each.budget.charge(BURST_S * 0.4)
        each.prepare()
    cheap = constraint(threads, Noted("cheap"))
    cheap.prepare()
    gate.set()
    assert cheap.allowed().any()
    for each in (*busy, *costly):
        each.allowed()
    assert order[:1] == ["cheap"]
    threads.close()


@pytest.mark.parametrize("recurrent", [False, True])
async def test_a_request_over_its_budget_waits_and_others_do_not(recurrent: bool) -> None:
    states = RecurrentState(num_slots=24, slot_bytes=16) if recurrent else None
    honest = SamplingParams(max_tokens=60, ignore_eos=True)
    slow = SamplingParams(
        max_tokens=60,
        ignore_eos=True,
        structured=StructuredOutput(regex="[a-z ]{200}"),
        temperature=1.0,
        seed=5,
    )
    async with running(states=states) as (engine, _, _):
        alone, expected = await _whole(engine, honest), await _whole(engine, slow)
    gate = Gate()
    async with running(gate=gate, states=states) as (engine, fake, _):
        gate.allow(3)
        stream = engine.generate("x", slow)
        first = await anext(stream)
        assert fake.core is not None
        (sample,) = fake.core._live.by_sequence.values()
        own = sample.state.constraint
        assert isinstance(own, Constraint)
        masks = threading.Event()
        slowed = Slowed(own.matcher, masks)
        own.matcher = slowed  # type: ignore[assignment]
        own.budget.charge(BURST_S * 0.6)
        gate.open()
        while not slowed.waits:
            await asyncio.sleep(0.001)
        num_slow = len(sample.sequence.tokens)
        assert (await _whole(engine, honest))[0].token_ids == alone[0].token_ids
        assert len(sample.sequence.tokens) == num_slow, "it waits for its mask"
        masks.set()
        collector = OutputCollector()
        collector.add(first)
        async for delta in stream:
            collector.add(delta)
        merged = collector.take()
        assert merged.finish_reason is FinishReason.LENGTH
        assert merged.token_ids == expected[0].token_ids


class Slowed:
    def __init__(self, matcher: Any, gate: threading.Event) -> None:
        self._matcher, self._gate = matcher, gate
        self.waits = False

    def compute_bitmask(self) -> bytes:
        self.waits = True
        assert self._gate.wait(60)
        return bytes(self._matcher.compute_bitmask())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


def test_a_grammar_whose_mask_is_stuck_is_refused_meanwhile() -> None:
    own = ConstraintCompiler(byte_tokenizer(), vocab_size=VOCAB_SIZE)
    made = own.compile(StructuredOutput(regex="ab"))
    made.lexer.num_stuck = 1
    with pytest.raises(InvalidRequest, match="regex cannot be used now: checking it for another output"):
        own.compile(StructuredOutput(regex="ab"))
    own.compile(StructuredOutput(regex="abc"))
    made.lexer.num_stuck = 0
    own.compile(StructuredOutput(regex="ab"))
    own.close()
