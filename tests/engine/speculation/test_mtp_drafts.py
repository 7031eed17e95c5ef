from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.block_manager import BlockManager
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor.base import RunOutput
from octavo.engine.executor.batch import Batch
from octavo.engine.executor.sampling.sampler import Sampled, SampleState
from octavo.engine.speculation.draft_tables import DraftRequest, DraftState, States
from octavo.engine.speculation.mtp_drafts import READ_AT, MTPDrafts
from octavo.scheduler import ScheduledChunk, SchedulerOutput
from octavo.scheduler import Sequence as Served

GUESS = 7


class FakeHead:
    num_pages, page_size, max_model_len = 16, 4, 200

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, float]] = []

    def run(self, batch: Batch, hidden: States, states: Sequence[SampleState]) -> RunOutput:
        self.rows += zip(
            batch.attention.positions.tolist(), batch.token_ids.tolist(), hidden[:, 0].tolist(), strict=True
        )
        return RunOutput(
            tuple(Sampled(GUESS) for _ in states), hidden=np.full((len(states), 1), -1, np.float32)
        )

    def take(self) -> list[tuple[int, int, float]]:
        rows, self.rows = self.rows, []
        return rows


class Engine:
    def __init__(self, tokens: list[int], num_pages: int = 16) -> None:
        self.head = FakeHead()
        self.drafts = MTPDrafts(self.head, BlockManager(num_pages, 4, prefix_cache=False), max_tokens=100)
        self.sequence = Served("a", tokens, 100)
        self.guesses = self.drafts.begin(self.sequence)

    def compute(self, start: int, stop: int, drafts: tuple[int, ...] = (), *, plus: float = 0.0) -> None:
        rows = self.drafts.rows_of(
            SchedulerOutput((ScheduledChunk(self.sequence, start, stop, True, drafts=drafts),))
        )
        assert rows is not None
        assert rows.tolist() == list(range(stop - start + len(drafts)))
        self.drafts.record(np.arange(start, stop + len(drafts), dtype=np.float32)[:, None] + plus)

    def draft(self, count: int) -> tuple[int, ...]:
        return self.drafts.draft([ask(self.guesses, count)])[0]


def ask(guesses: DraftState, count: int) -> DraftRequest:
    state = SampleState(SamplingParams(), seed=0, prompt_ids=[], vocab_size=50)
    return DraftRequest(guesses, guesses.sequence.tokens, state, count)


def test_hidden_states_come_from_the_model_then_from_the_head() -> None:
    engine = Engine([10, 11, 12, 13, 14])
    engine.compute(0, 4)
    assert engine.draft(3) == (GUESS,) * 3
    assert engine.head.take() == [
        (0, 11, 0), (1, 12, 1), (2, 13, 2), (3, 14, 3), (4, GUESS, -1), (5, GUESS, -1),
    ]  # fmt: skip


def test_a_long_prompt_is_read_before_anybody_asks() -> None:
    engine = Engine(list(range(2 * READ_AT)))
    engine.compute(0, READ_AT - 1)
    assert engine.drafts.draft([]) == []
    assert not engine.head.take()
    engine.compute(READ_AT - 1, READ_AT)
    engine.drafts.draft([])
    assert engine.head.take() == [(i, i + 1, i) for i in range(READ_AT)]


def test_after_a_gap_the_head_starts_again() -> None:
    engine = Engine(list(range(40)))
    engine.compute(0, 5)
    del engine.sequence.tokens[6:]
    engine.draft(1)
    engine.head.take()
    engine.sequence.tokens += range(6, 33)
    engine.compute(30, 32)
    engine.draft(1)
    assert engine.head.take() == [(0, 31, 30), (1, 32, 31)]
    engine.drafts.close(engine.guesses)
    assert engine.drafts.blocks.counts.held == 0


def test_a_sample_whose_pages_were_taken_starts_again() -> None:
    engine = Engine(list(range(20)), num_pages=6)
    engine.compute(0, 19)
    engine.draft(1)
    other = Served("b", list(range(20)), 100)
    guesses = engine.drafts.begin(other)
    engine.drafts.rows_of(SchedulerOutput((ScheduledChunk(other, 0, 19, True),)))
    engine.drafts.record(np.arange(19, dtype=np.float32)[:, None])
    assert engine.drafts.draft([ask(guesses, 1)]) == [(GUESS,)]
    engine.head.take()
    engine.compute(19, 20)
    engine.sequence.tokens.append(99)
    engine.draft(1)
    assert engine.head.take() == [(0, 99, 19)]
