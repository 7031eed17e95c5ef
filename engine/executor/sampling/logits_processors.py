"""Changes of logits before sampling: bias, penalties and excluded tokens."""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Collection, Iterable, MutableMapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...api.sampling_params import SamplingParams
from .truncation import Floats, Ids

_NO_IDS: Ids = np.empty(0, np.intp)
_NO_VALUES: Floats = np.empty(0, np.float32)


class LogitAdjustments(NamedTuple):
    """Changes of logits, applied in the order of the fields."""

    bias_ids: Ids
    bias: Floats
    seen_ids: Ids
    repetition_penalty: float
    output_ids: Ids
    output_counts: Floats
    frequency_penalty: float
    presence_penalty: float
    suppressed_ids: Ids

    def apply(self, logits: Floats) -> None:
        """Change logits [V] in place, in float32."""
        logits[self.bias_ids] += self.bias
        if len(self.seen_ids):
            values, penalty = logits[self.seen_ids], np.float32(self.repetition_penalty)
            logits[self.seen_ids] = np.where(values > 0, values / penalty, values * penalty)
        if len(self.output_ids):
            logits[self.output_ids] -= np.float32(self.frequency_penalty) * self.output_counts
            logits[self.output_ids] -= np.float32(self.presence_penalty)
        logits[self.suppressed_ids] = -np.inf


class LogitsProcessors:
    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_ids: Sequence[int],
        vocab_size: int,
        end_ids: Collection[int],
        bad_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        suppressed = {token for token in end_ids if 0 <= token < vocab_size} if params.min_tokens else ()
        self.suppressed_ids: Ids = np.array(sorted(suppressed), np.intp)
        counts = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._params = params
        self._bias_ids: Ids = np.fromiter(params.logit_bias.keys(), np.intp, len(params.logit_bias))
        self._bias: Floats = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._seen = _TokenCounts(prompt_ids) if params.repetition_penalty != 1 else None
        self._output = _TokenCounts(()) if counts else None
        self._bad_ids = bad_ids
        self._num_recent = max(map(len, bad_ids), default=1) - 1
        self._recent: tuple[int, ...] = ()
        self.follows = self._seen is not None or counts or self._num_recent > 0
        self.any = bool(params.logit_bias or bad_ids) or self.follows

    def record(self, token: int) -> None:
        for counts in (self._seen, self._output):
            if counts is not None:
                counts.add(token)
        self._add_recent((token,))

    def _add_recent(self, tokens: Sequence[int]) -> None:
        if self._num_recent:
            self._recent = (*self._recent, *tokens)[-self._num_recent :]

    def after(self, tokens: Sequence[int]) -> LogitsProcessors:
        if not self.follows:
            return self
        ahead = copy.copy(self)
        ahead._seen = None if self._seen is None else self._seen.after(tokens)
        ahead._output = None if self._output is None else self._output.after(tokens)
        ahead._add_recent(tokens)
        return ahead

    def changes(self, *, suppress: bool) -> LogitAdjustments:
        """Return the changes for the next token, valid until ``record``."""
        seen, output, params = self._seen, self._output, self._params
        return LogitAdjustments(
            self._bias_ids,
            self._bias,
            _NO_IDS if seen is None else seen.ids,
            params.repetition_penalty,
            _NO_IDS if output is None else output.ids,
            _NO_VALUES if output is None else output.counts,
            params.frequency_penalty,
            params.presence_penalty,
            self._suppressed(suppress),
        )

    def _suppressed(self, suppress: bool) -> Ids:
        ends = self.suppressed_ids if suppress else _NO_IDS
        recent = self._recent
        bad = {ids[-1] for ids in self._bad_ids if len(ids) == 1 or recent[1 - len(ids) :] == tuple(ids[:-1])}
        return np.union1d(ends, np.array(sorted(bad), np.intp)) if bad else ends


class _TokenCounts:
    def __init__(self, tokens: Iterable[int]) -> None:
        ids, counts = np.unique(np.fromiter(tokens, np.intp), return_counts=True)
        self._ids, self._counts, self._size = ids, counts.astype(np.float32), len(ids)
        self._index: MutableMapping[int, int] = {int(token): i for i, token in enumerate(ids)}

    def after(self, tokens: Sequence[int]) -> _TokenCounts:
        ahead = copy.copy(self)
        ahead._ids, ahead._counts = self.ids.copy(), self.counts.copy()
        ahead._index = ChainMap({}, self._index)
        for token in tokens:
            ahead.add(token)
        return ahead

    @property
    def ids(self) -> NDArray[np.intp]:
        return self._ids[: self._size]

    @property
    def counts(self) -> Floats:
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        index = self._index.setdefault(token, self._size)
        if index == self._size:
            if index == len(self._ids):
                self._ids = np.resize(self._ids, max(64, 2 * index))
                self._counts = np.resize(self._counts, max(64, 2 * index))
            self._ids[index], self._counts[index] = token, 0
            self._size += 1
        self._counts[index] += 1
