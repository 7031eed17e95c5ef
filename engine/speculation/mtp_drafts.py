"""Drafts from the model's own head for multi-token prediction (MTP).

For each position the head reads the model's hidden state and the next token. Further drafts use the
head's own hidden states. The head's KV cache begins at the first hidden state, so it omits cached prefixes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from octavo.block_manager import BlockManager
from octavo.kernels.metadata import Ints
from octavo.scheduler import ScheduledChunk, SchedulerOutput, Sequence

from ..executor.base import HeadRunner
from ..executor.batch import build_batch
from ..executor.sampling.sampler import SampleState
from .draft_tables import BatchDrafter, DraftRequest, DraftState, States

READ_AT = 64
"""Number of waiting rows at which the head reads them."""


@dataclass(slots=True, eq=False)
class _Reader:
    draft_state: DraftState
    first: int = 0
    num_read: int = 0
    waiting: list[States] = field(default_factory=list)

    @property
    def has_pages(self) -> bool:
        draft_sequence = self.draft_state.draft_sequence
        return self.num_read == (0 if draft_sequence is None else draft_sequence.num_written)

    def add(self, position: int, states: States) -> bool:
        known = self.first + self.num_read + len(self.waiting)
        if not (self.has_pages and self.first <= position <= known):
            return False
        self.waiting.extend(states[known - position :].copy())
        return True

    def begin(self, position: int) -> None:
        self.first, self.num_read = position, 0
        self.waiting.clear()

    def keep(self, num_positions: int) -> None:
        del self.waiting[max(0, num_positions - self.first - self.num_read) :]


class MTPDrafts(BatchDrafter):
    def __init__(self, head: HeadRunner, blocks: BlockManager, *, max_tokens: int) -> None:
        super().__init__(blocks)
        self._head = head
        self._max_tokens = max_tokens
        self._readers: dict[Sequence, _Reader] = {}
        self._owners: list[tuple[list[Sequence], int, int]] = []

    def begin(self, sequence: Sequence) -> DraftState:
        draft_state = super().begin(sequence)
        self._readers[sequence] = _Reader(draft_state)
        return draft_state

    def close(self, draft_state: DraftState) -> None:
        super().close(draft_state)
        self._readers.pop(draft_state.sequence, None)

    def rows_of(self, step: SchedulerOutput) -> Ints | None:
        self._owners = []
        rows: list[int] = []
        first = 0
        for item in step.work:
            stop = first + item.end - item.start
            sharing = [each for each in (item.sequence, *item.parallel_samples) if each in self._readers]
            if sharing:
                rows += range(first, stop)
                self._owners.append((sharing, item.start, stop - first))
            first = stop
        return np.array(rows, np.int32) if rows else None

    def record(self, states: States) -> None:
        first = 0
        for sharing, position, count in self._owners:
            own = states[first : first + count]
            first += count
            for reader in [self._readers[each] for each in sharing if each in self._readers]:
                if not reader.add(position, own):
                    self.close_table(reader.draft_state)
                    reader.begin(position)
                    reader.add(position, own)

    def draft(self, requests: Iterable[DraftRequest]) -> list[tuple[int, ...]]:
        """Return drafts. ``requests`` must include every sample that got tokens from the last step."""
        requests = list(requests)
        for request in requests:
            self._readers[request.draft_state.sequence].keep(len(request.tokens) - 1)
        rounds = _Rounds(self, requests)
        while rounds.rows:
            began, drafts_only = time.monotonic(), all(item.samples for item, _, _ in rounds.rows)
            rounds.compute()
            if drafts_only:
                self.round_s.add(time.monotonic() - began)
        return [tuple(tokens) for tokens in rounds.tokens]


class _Rounds:
    def __init__(self, drafts: MTPDrafts, requests: list[DraftRequest]) -> None:
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.rows: list[tuple[ScheduledChunk, int | None, list[States]]] = []
        self._drafts = drafts
        self._requests = requests
        budget = drafts._max_tokens
        self._busy = {
            request.draft_state: index for index, request in enumerate(requests) if request.count > 0
        }
        for reader in drafts._readers.values():
            index = self._busy.get(reader.draft_state)
            if len(reader.waiting) < (READ_AT if index is None else 1) or budget < 1:
                continue
            if (work := self._begin(reader, index, budget)) is not None:
                count = work.stop - work.start
                self.rows.append((work, index, reader.waiting[:count]))
                del reader.waiting[:count]
                reader.num_read += count
                budget -= count

    def _begin(self, reader: _Reader, index: int | None, budget: int) -> ScheduledChunk | None:
        draft_state, start = reader.draft_state, reader.num_read
        stop = start + min(len(reader.waiting), budget)
        num_drafts = 0 if index is None or stop < start + len(reader.waiting) else self._requests[index].count
        tokens = draft_state.sequence.tokens[reader.first + 1 + start : reader.first + 1 + stop]
        end = stop + max(0, num_drafts - 1)
        if end > self._drafts._head.max_model_len or not reader.has_pages:
            return None
        table = self._drafts.open_table(draft_state, tokens)
        draft_sequence = draft_state.draft_sequence
        assert draft_sequence is not None
        draft_sequence.tokens[start:] = tokens
        if not self._drafts.reserve(draft_state, end, self._busy):
            return None
        assert table.num_written == start
        return ScheduledChunk(draft_sequence, start, stop, num_drafts > 0)

    def compute(self) -> None:
        step = SchedulerOutput(tuple(work for work, _, _ in self.rows))
        states: list[SampleState] = []
        for work, index, _ in self.rows:
            if work.samples:
                assert index is not None
                states.append(self._requests[index].state.with_drafts(self.tokens[index]))
        hidden = np.stack([row for _, _, rows in self.rows for row in rows])
        blocks = self._drafts.blocks
        batch = build_batch(step, blocks.page_size, blocks.groups)
        output = self._drafts._head.run(batch, hidden, states)
        failed = set(output.failed_rows)
        rows, self.rows = self.rows, []
        drawn, first = 0, 0
        for work, index, _ in rows:
            stop = first + work.stop - work.start
            sampled = None
            if work.samples:
                assert output.hidden is not None
                sampled, further = output.samples[drawn].token, output.hidden[drawn]
                drawn += 1
            own, first = range(first, stop), stop
            if failed.intersection(own) or (work.samples and sampled is None):
                continue
            self._read(work, index)
            if index is None or sampled is None:
                continue
            tokens = self.tokens[index]
            tokens.append(sampled)
            if len(tokens) < self._requests[index].count:
                work.sequence.tokens.append(sampled)
                self.rows.append(
                    (ScheduledChunk(work.sequence, work.stop, work.stop + 1, True), index, [further])
                )

    def _read(self, work: ScheduledChunk, index: int | None) -> None:
        if index is not None and self.tokens[index]:
            return
        assert work.sequence.table is not None
        self._drafts.blocks.commit(work.sequence.table, work.sequence.tokens, work.stop)
