from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import numpy as np

from octavo.kernels.metadata import Ints

from .base import RunOutput, with_failures
from .batch import Batch
from .sampling.device_sampling import FAILED, UNSURE, draw_tokens, sampling_arrays
from .sampling.logit_rows import Sampler
from .sampling.sampler import NOT_FINITE, Sampled, SampleState


class DeviceStep:
    def __init__(
        self,
        batch: Batch,
        logits: mx.array,
        places: Sequence[int],
        states: Sequence[SampleState],
        flags: Sequence[mx.array],
        *,
        sampling: Sampler,
        after: DeviceStep | None = None,
        feeds: bool = False,
    ) -> None:
        self._batch = batch
        self._sampling = sampling
        self._after = after
        here = [i for i, state in enumerate(states) if state.is_unprocessed]
        self._here, self._others = here, [i for i, state in enumerate(states) if not state.is_unprocessed]
        self._states = list(states)
        self._feeds = feeds and not self._others
        self._changed: frozenset[int] = frozenset()
        self._logits = _rows(logits, [places[i] for i in here])
        self._host_rows = _rows(logits, [places[i] for i in self._others]).astype(mx.float32)
        report = [mx.zeros(0, mx.int32)]
        if here:
            resampled = draw_tokens(self._logits, sampling_arrays([states[i] for i in here]))
            self.tokens = resampled[0]
            report.append(resampled.reshape(-1))
        report += [flag.astype(mx.int32) for flag in flags]
        self._report = mx.concatenate(report)

    @property
    def arrays(self) -> list[mx.array]:
        return [self._report, self._host_rows, self._logits] if self._others else [self._report, self._logits]

    @property
    def feeds(self) -> bool:
        return self._feeds and not self._discarded()

    def take(self, sources: Ints) -> mx.array:
        assert self._feeds, "a token of this step is sampled on the host"
        return self.tokens[mx.array(sources)]

    def resolve(self) -> RunOutput:
        count, num_rows = len(self._here), len(self._batch.token_ids)
        discarded, self._after = self._discarded(), None
        values = np.array(self._report)
        tokens, verdicts = (
            cast("list[int]", part.tolist()) for part in values[: 2 * count].reshape(2, count)
        )
        flags = values[2 * count :].reshape(-1, num_rows).any(axis=0)
        samples: dict[int, Sampled] = {
            i: Sampled(None, error=NOT_FINITE) if verdict == FAILED else Sampled(token)
            for i, token, verdict in zip(self._here, tokens, verdicts, strict=True)
        }
        if unsure := [place for place, verdict in enumerate(verdicts) if verdict == UNSURE]:
            samples |= self._resample(unsure, tokens)
        if self._others:
            states = [self._states[i] for i in self._others]
            resampled = self._sampling.sample(self._host_rows, range(len(states)), states)
            samples.update(zip(self._others, resampled, strict=True))
        failed = np.flatnonzero(flags).tolist()
        in_order = [samples[i] for i in range(len(self._states))]
        return RunOutput(with_failures(in_order, self._batch, failed), tuple(failed), discarded=discarded)

    def _resample(self, unsure: Sequence[int], tokens: Sequence[int]) -> dict[int, Sampled]:
        rows = _rows(self._logits, unsure).astype(mx.float32)
        mx.eval(rows)
        states = [self._states[self._here[place]] for place in unsure]
        resampled = self._sampling.sample(rows, range(len(unsure)), states)
        self._changed = frozenset(
            self._here[place]
            for place, sampled in zip(unsure, resampled, strict=True)
            if sampled.token != tokens[place]
        )
        return {self._here[place]: sampled for place, sampled in zip(unsure, resampled, strict=True)}

    def _discarded(self) -> frozenset[int]:
        if self._after is None or not self._after._changed or self._batch.sources is None:
            return frozenset()
        sources = self._batch.sources.tolist()
        changed = self._after._changed
        return frozenset(
            i for i, row in enumerate(self._batch.sample_rows.tolist()) if sources[row] in changed
        )


def _rows(logits: mx.array, places: Sequence[int]) -> mx.array:
    if list(places) == list(range(logits.shape[0])):
        return logits
    return logits[mx.array(np.array(places, np.int32))]
