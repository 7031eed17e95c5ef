"""A small model with the target's tokenizer that drafts tokens for many sequences at once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from octavo.block_manager import BlockManager, PageTable
from octavo.scheduler import ScheduledChunk, SchedulerOutput

from ..executor.base import ModelRunner
from ..executor.batch import build_batch
from .draft_tables import Ask, BatchDrafter, Guesses


class _Row(NamedTuple):
    place: int
    ask: Ask
    work: ScheduledChunk
    most: int


class DraftModel(BatchDrafter):
    """Drafter with a small model. Used only on the engine's thread."""

    def __init__(
        self,
        runner: ModelRunner,
        blocks: BlockManager,
        *,
        max_tokens: int,
        vocab_size: int,
    ) -> None:
        super().__init__(blocks)
        self._runner = runner
        self._max_tokens = max_tokens
        self._vocab_size = min(vocab_size, runner.info.vocab_size)
        self._max_model_len = runner.info.max_model_len

    def guess(self, asks: Iterable[Ask]) -> list[tuple[int, ...]]:
        asks, given = list(asks), dict[int, list[int]]()
        budget = self._max_tokens
        rows: list[_Row] = []
        busy = {ask.guesses for ask in asks}
        for index, ask in enumerate(asks):
            if ask.count < 1 or budget < 1 or not self._begin(ask, busy):
                continue
            served = ask.guesses.served
            assert served is not None
            start = served.num_written
            stop = min(len(ask.tokens), start + budget)
            budget -= stop - start
            work = ScheduledChunk(served, start, stop, stop == len(ask.tokens))
            rows.append(_Row(index, ask, work, ask.count))
            given[index] = []
        while rows:
            began, is_plain = time.monotonic(), all(row.work.stop - row.work.start == 1 for row in rows)
            rows = self._round(rows, given)
            if is_plain:
                self.round_s.add(time.monotonic() - began)
        return [tuple(given.get(index, ())) for index in range(len(asks))]

    def shut_down(self) -> None:
        super().shut_down()
        self._runner.close()

    def _begin(self, ask: Ask, busy: set[Guesses]) -> bool:
        guesses, tokens = ask.guesses, ask.tokens
        end = len(tokens) + ask.count - 1
        served = guesses.served
        new = tokens if served is None else tokens[served.num_written :]
        if max(new) >= self._runner.info.vocab_size:
            guesses.failed = True
        if guesses.failed or end > self._max_model_len:
            self.close(guesses)
            return False
        table = self.open_table(guesses, tokens)
        if served is None:
            guesses.fed = list(tokens[: table.num_written])
        assert guesses.served is not None
        served = guesses.served
        served.tokens[:] = tokens
        right = _num_common(guesses.fed, tokens, start=table.num_written)
        right = min(right, len(tokens) - 1, table.capacity)
        if not _stands_at(table, right, num_fed=len(guesses.fed)):
            self.close(guesses)
            return self._begin(ask, busy)
        self.blocks.commit(table, served.tokens, right)
        del guesses.fed[table.num_written :]
        return self.reserve(guesses, end, busy)

    def _keep_state(self, row: _Row, given: list[int]) -> _Row:
        table = row.work.sequence.table
        assert table is not None
        if table.state is None or not row.work.samples or len(given) + 1 >= row.most:
            return row
        if not self.blocks.num_draftable(0):
            return row._replace(most=len(given) + 1)
        self.blocks.plan_drafts(table, row.work.stop, 1)
        return row

    def _round(self, rows: list[_Row], given: dict[int, list[int]]) -> list[_Row]:
        rows = [self._keep_state(row, given[row.place]) for row in rows]
        step = SchedulerOutput(tuple(row.work for row in rows))
        states = [row.ask.state.guessing(given[row.place]) for row in rows if row.work.samples]
        output = self._runner.run(build_batch(step, self.blocks.page_size, self.blocks.groups), states)
        sampled = iter(output.samples)
        going_on: list[_Row] = []
        failed = set(output.failed_rows)
        first = 0
        for index, ask, item, most in rows:
            guesses, served = ask.guesses, item.sequence
            own = range(first, first + item.stop - item.start)
            first = own.stop
            token = next(sampled).token if item.samples else None
            if failed.intersection(own) or (item.samples and token is None):
                guesses.failed = True
                self.close(guesses)
                continue
            guesses.fed += served.tokens[item.start : item.stop]
            if token is None:
                assert served.table is not None
                self.blocks.commit(served.table, served.tokens, item.stop)
                continue
            if token >= self._vocab_size:
                continue
            given[index].append(token)
            if len(given[index]) < most:
                served.tokens.append(token)
                going_on.append(
                    _Row(index, ask, ScheduledChunk(served, item.stop, item.stop + 1, True), most)
                )
        return going_on


def _stands_at(table: PageTable, position: int, *, num_fed: int) -> bool:
    state = table.state
    return state is None or position == num_fed or any(position == kept for kept, _ in state.drafted)


def _num_common(fed: Sequence[int], tokens: Sequence[int], *, start: int) -> int:
    count, most = start, min(len(fed), len(tokens))
    while count < most and fed[count] == tokens[count]:
        count += 1
    return count
