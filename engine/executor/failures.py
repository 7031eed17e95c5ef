"""Failures: samples of a step whose rows have K or V that is not finite."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .base import RunOutput
from .batch import Batch
from .sampling.sampler import Sampled

KV_NOT_FINITE = "the model computed keys, values or states that are not finite (NaN or infinity)"


def with_failures(samples: Sequence[Sampled], batch: Batch, failed: Sequence[int]) -> tuple[Sampled, ...]:
    """Samples whose row is a failed one, or comes after one of its sequence, become failures themselves."""
    if not failed:
        return tuple(samples)
    starts = batch.attention.q_start[1:]
    first_failed: dict[int, int] = {}  # by the sequence that owns it
    for row, owner in zip(failed, np.searchsorted(starts, failed, side="right").tolist(), strict=True):
        first_failed[owner] = min(row, first_failed.get(owner, row))
    rows = batch.sample_rows.tolist()
    owners = np.searchsorted(starts, batch.sample_rows, side="right").tolist()
    return tuple(
        Sampled(token=None, error=KV_NOT_FINITE) if first_failed.get(owner, row + 1) <= row else drawn
        for drawn, row, owner in zip(samples, rows, owners, strict=True)
    )


def with_failed_rows(batch: Batch, run: RunOutput) -> RunOutput:
    """Return the output of a whole batch, in which samples of failed rows are failures."""
    if not run.failed_rows:
        return run
    return run._replace(samples=with_failures(run.samples, batch, run.failed_rows))


def joined(runs: Sequence[RunOutput]) -> RunOutput:
    """The output of slices that were computed one after the other."""
    hidden: list[npt.NDArray[np.float32]] = [run.hidden for run in runs if run.hidden is not None]
    return RunOutput(
        tuple(itertools.chain.from_iterable(run.samples for run in runs)),
        tuple(itertools.chain.from_iterable(run.failed_rows for run in runs)),
        tuple(itertools.chain.from_iterable(run.scores for run in runs)),
        np.concatenate(hidden) if hidden else None,
    )
