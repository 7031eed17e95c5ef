from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_harness import admission_of
from fakes import byte_tokenizer, fake_info, small_config
from ledger_runner import LedgerRunner
from octavo.block_manager import BlockManager, Digest
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.prompt import EncodedPrompt
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.core.request import Request
from octavo.engine.kv_store.transfer import PageTransfer
from octavo.kernels.page_bytes import PageBytes
from octavo.scheduler import KVConnector, Limits, Scheduler, SchedulerOutput, Sequence, Status
from oracle import alone

PROMPT = list(range(50))
FOUR_TOKENS = SamplingParams(max_tokens=4, ignore_eos=True)
Store = dict[Digest, PageBytes]


@dataclass
class HostMemory(KVConnector):
    """Stores pages in a dictionary, which several engines can share."""

    blocks: BlockManager
    transfer: PageTransfer
    access: LedgerRunner
    store: Store
    delay: int = 0
    loading: dict[Sequence, int] = field(default_factory=dict)
    wake: Callable[[], None] = lambda: None
    closed: bool = False

    @property
    def has_updates(self) -> bool:
        return bool(self.loading)

    def on_update(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    @property
    def saves_steps(self) -> bool:
        return True

    def start_load(self, sequence: Sequence, /, *, token_s: float | None = None) -> bool:  # noqa: ARG002
        digests = self.blocks.page_digests(sequence.tokens, sequence.digests, salt=sequence.salt)
        found = self.blocks.num_findable(digests)
        if found == len(digests) or digests[found] not in self.store:
            return False
        self.loading[sequence] = self.delay
        return True

    def poll(self) -> list[Sequence]:
        ready = [sequence for sequence, wait in self.loading.items() if not wait]
        self.loading = {s: wait - 1 for s, wait in self.loading.items() if wait}
        for sequence in ready:
            first = self.blocks.num_findable(sequence.digests)
            stop = first
            while stop < len(sequence.digests) and sequence.digests[stop] in self.store:
                stop += 1
            if stop == first:
                continue
            pages = np.stack([self.store[digest] for digest in sequence.digests[first:stop]])
            self.transfer.insert(sequence.tokens, pages, sequence.salt, first=first)
        return ready

    def cancel_load(self, sequence: Sequence) -> None:
        del self.loading[sequence]

    def save(self, step: SchedulerOutput) -> None:
        size = self.blocks.page_size
        for sequence, start, stop, *_ in step.work:
            for digest in sequence.digests[start // size : stop // size]:
                if (page := self.blocks.find(digest)) is not None:
                    self.store[digest] = self.access.read_pages([page], 0)[0]

    def close(self) -> None:
        self.closed = True


class Engine:
    def __init__(self, store: Store, *, delay: int = 0, num_pages: int = 64) -> None:
        config = small_config(num_pages=num_pages)
        runner = LedgerRunner(fake_info(config))
        blocks = BlockManager(num_pages, config.page_size, max_chunk=config.max_step_tokens)
        transfer = PageTransfer(runner, blocks)
        self.connector = HostMemory(blocks, transfer, runner, store, delay)
        limits = Limits(config.max_step_tokens, config.max_running)
        self.scheduler = Scheduler(blocks, limits, self.connector)
        self.blocks = blocks
        self.core = EngineCore(runner, byte_tokenizer(), blocks, self.scheduler, transfer=transfer)
        self._input = admission_of(self.core)
        self.tokens: dict[Request, list[int]] = {}
        self.ended: dict[Request, FinishReason] = {}

    def add(self, prompt: list[int], params: SamplingParams = FOUR_TOKENS) -> Request:
        request = self.core.builder.build(self._input.admit(EncodedPrompt(prompt), params))
        self.core.add(request)
        self.tokens[request] = []
        return request

    def step(self) -> None:
        for request, delta in self.core.step():
            self.tokens[request] += delta.token_ids
            if delta.finish_reason is not None:
                self.ended[request] = delta.finish_reason
        self.blocks.check()

    def run(self) -> None:
        for _ in range(2000):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("the engine gets nowhere")


def test_one_engine_loads_pages_that_another_saved() -> None:
    store: Store = {}
    for cached in (0, 48):
        engine = Engine(store)
        request = engine.add(PROMPT)
        engine.run()
        assert request.num_cached == cached
        assert engine.tokens[request] == alone(PROMPT, FOUR_TOKENS).token_ids
        engine.core.close()
        assert engine.connector.closed


def test_waiting_for_pages_delays_no_other_sequence() -> None:
    store: Store = {}
    first = Engine(store)
    first.add(PROMPT)
    first.run()
    engine = Engine(store, delay=10)
    waits = engine.add(PROMPT)
    other = engine.add([200, 201])
    assert waits.samples[0].sequence.status is Status.WAITING_FOR_PAGES
    assert engine.scheduler.num_waiting == 2
    for _ in range(6):
        engine.step()
    assert engine.ended == {other: FinishReason.LENGTH}
    assert waits.samples[0].sequence.status is Status.WAITING_FOR_PAGES
    engine.run()
    assert engine.tokens[waits] == alone(PROMPT, FOUR_TOKENS).token_ids
    assert waits.num_cached == 48


@pytest.mark.parametrize("n", [1, 3])
def test_one_that_waits_for_pages_is_aborted_like_any_other(n: int) -> None:
    store: Store = {}
    first = Engine(store)
    first.add(PROMPT)
    first.run()
    engine = Engine(store, delay=10)
    request = engine.add(PROMPT, SamplingParams(max_tokens=4, n=n, seed=0, temperature=1))
    engine.step()
    engine.core.abort(request)
    assert not engine.connector.loading
    assert not engine.scheduler.has_work
    engine.step()
    assert engine.ended == {request: FinishReason.ABORT}
    assert engine.scheduler.num_waiting == engine.blocks.counts.held == 0


@given(
    delay=st.integers(0, 3),
    prompts=st.lists(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=40), min_size=1, max_size=8),
    aborted=st.sets(st.integers(0, 7)),
    kept=st.integers(0, 99),
)
def test_bad_pages_from_the_store_never_change_outputs(
    delay: int, prompts: list[list[int]], aborted: set[int], kept: int
) -> None:
    store: Store = {}
    first = Engine(store)
    for prompt in prompts:
        first.add(prompt)
    first.run()
    for index, digest in enumerate(list(store)):
        if (index * 37) % 100 > kept:
            del store[digest]
    engine = Engine(store, delay=delay, num_pages=16)
    requests = [engine.add(prompt) for prompt in prompts]
    for index in aborted & set(range(len(requests))):
        engine.core.abort(requests[index])
    engine.run()
    for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        if index in aborted:
            assert engine.ended[request] is FinishReason.ABORT
        else:
            assert engine.tokens[request] == alone(prompt, FOUR_TOKENS).token_ids
    assert engine.blocks.counts.held == 0
