"""A small model with the target's tokenizer that drafts tokens for many sequences at once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from octavo.block_manager import BlockManager, PageTable
from octavo.scheduler import ScheduledChunk, SchedulerOutput

from ..executor.base import ModelRunner
from ..executor.batch import build_batch
from .draft_tables import BatchDrafter, DraftRequest, DraftState


class _Row(NamedTuple):
    place: int
    request: DraftRequest
    work: ScheduledChunk
    max_drafts: int


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

    def draft(self, requests: Iterable[DraftRequest]) -> list[tuple[int, ...]]:
        requests, drafts = list(requests), dict[int, list[int]]()
        budget = self._max_tokens
        rows: list[_Row] = []
        busy = {request.draft_state for request in requests}
        for index, request in enumerate(requests):
            if request.count < 1 or budget < 1 or not self._begin(request, busy):
                continue
            draft_sequence = request.draft_state.draft_sequence
            assert draft_sequence is not None
            start = draft_sequence.num_written
            stop = min(len(request.tokens), start + budget)
            budget -= stop - start
            work = ScheduledChunk(draft_sequence, start, stop, stop == len(request.tokens))
            rows.append(_Row(index, request, work, request.count))
            drafts[index] = []
        while rows:
            began, is_plain = time.monotonic(), all(row.work.stop - row.work.start == 1 for row in rows)
            rows = self._round(rows, drafts)
            if is_plain:
                self.round_s.add(time.monotonic() - began)
        return [tuple(drafts.get(index, ())) for index in range(len(requests))]

    def shut_down(self) -> None:
        super().shut_down()
        self._runner.close()

    def _begin(self, request: DraftRequest, busy: set[DraftState]) -> bool:
        draft_state, tokens = request.draft_state, request.tokens
        end = len(tokens) + request.count - 1
        draft_sequence = draft_state.draft_sequence
        new = tokens if draft_sequence is None else tokens[draft_sequence.num_written :]
        if max(new) >= self._runner.info.vocab_size:
            draft_state.failed = True
        if draft_state.failed or end > self._max_model_len:
            self.close(draft_state)
            return False
        table = self.open_table(draft_state, tokens)
        if draft_sequence is None:
            draft_state.inputs = list(tokens[: table.num_written])
        assert draft_state.draft_sequence is not None
        draft_sequence = draft_state.draft_sequence
        draft_sequence.tokens[:] = tokens
        num_valid = _num_common(draft_state.inputs, tokens, start=table.num_written)
        num_valid = min(num_valid, len(tokens) - 1, table.capacity)
        if not _has_state_at(table, num_valid, num_read=len(draft_state.inputs)):
            self.close(draft_state)
            return self._begin(request, busy)
        self.blocks.commit(table, draft_sequence.tokens, num_valid)
        del draft_state.inputs[table.num_written :]
        return self.reserve(draft_state, end, busy)

    def _plan_state(self, row: _Row, drafts: list[int]) -> _Row:
        table = row.work.sequence.table
        assert table is not None
        if table.state is None or not row.work.samples or len(drafts) + 1 >= row.max_drafts:
            return row
        if not self.blocks.num_draftable(0):
            return row._replace(max_drafts=len(drafts) + 1)
        self.blocks.plan_drafts(table, row.work.stop, 1)
        return row

    def _round(self, rows: list[_Row], drafts: dict[int, list[int]]) -> list[_Row]:
        rows = [self._plan_state(row, drafts[row.place]) for row in rows]
        step = SchedulerOutput(tuple(row.work for row in rows))
        states = [row.request.state.with_drafts(drafts[row.place]) for row in rows if row.work.samples]
        output = self._runner.run(build_batch(step, self.blocks.page_size, self.blocks.groups), states)
        sampled = iter(output.samples)
        unfinished: list[_Row] = []
        failed = set(output.failed_rows)
        first = 0
        for index, request, item, max_drafts in rows:
            draft_state, draft_sequence = request.draft_state, item.sequence
            own = range(first, first + item.stop - item.start)
            first = own.stop
            token = next(sampled).token if item.samples else None
            if failed.intersection(own) or (item.samples and token is None):
                draft_state.failed = True
                self.close(draft_state)
                continue
            draft_state.inputs += draft_sequence.tokens[item.start : item.stop]
            if token is None:
                assert draft_sequence.table is not None
                self.blocks.commit(draft_sequence.table, draft_sequence.tokens, item.stop)
                continue
            if token >= self._vocab_size:
                continue
            drafts[index].append(token)
            if len(drafts[index]) < max_drafts:
                draft_sequence.tokens.append(token)
                unfinished.append(
                    _Row(
                        index,
                        request,
                        ScheduledChunk(draft_sequence, item.stop, item.stop + 1, True),
                        max_drafts,
                    )
                )
        return unfinished


def _has_state_at(table: PageTable, position: int, *, num_read: int) -> bool:
    state = table.state
    return state is None or position == num_read or any(position == kept for kept, _ in state.drafted)


def _num_common(inputs: Sequence[int], tokens: Sequence[int], *, start: int) -> int:
    count, limit = start, min(len(inputs), len(tokens))
    while count < limit and inputs[count] == tokens[count]:
        count += 1
    return count
