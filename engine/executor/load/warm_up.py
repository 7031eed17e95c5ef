from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.kernels.metadata import AttentionMetadata, Ints, StateMetadata

from ...api.sampling_params import SamplingParams
from ..adapters.layers import SLOTS
from ..batch import Batch
from ..model_runner import PagedRunner
from ..sampling.sampler import SampleState
from .probe_steps import Work

LONG = 140
"""Number of positions for which backends split a row's attention."""


def warm_up(runner: PagedRunner, *, max_step_tokens: int) -> None:
    """Compute steps that make the backend compile its kernels."""
    for storage in runner.storages:
        if storage.spec.num_pages > 1:
            storage.copy_pages([(0, 1)])
    info = runner.info
    length = min(LONG, info.max_model_len - 1, (info.num_pages - 1) * info.page_size - 1)
    if length < 4:
        return
    most = min([max_step_tokens - 1, *((s.spec.num_pages - 1) * s.spec.page_size for s in runner.storages)])
    most = max(most, 1)
    pieces: list[list[Work]] = [[(0, at, min(at + most, length))] for at in range(0, length, most)]
    has_decode = max_step_tokens > 1
    if has_decode:
        pieces[-1].append((1, 0, 1))
    long = [(0, length, length + 1), *([(1, 1, 2)] if has_decode else [])]
    for work in [*pieces, long]:
        runner.submit(_batch(runner, work), _states(runner, work)).resolve()
    first = [(1, 2, 3)] if has_decode else [(1, 0, 1)]
    pending = runner.submit(_batch(runner, first), _states(runner, first))
    if pending.feeds:
        then = [(sequence, stop, stop + 1) for sequence, _, stop in first]
        following = runner.submit(_batch(runner, then, follows=True), _states(runner, then), pending)
        pending.resolve()
        following.resolve()
    else:
        pending.resolve()


def try_adapters(runner: PagedRunner) -> None:
    """Compute steps with an adapter that changes nothing. Raises ModelLoadError."""
    info = runner.info
    length = min(6, info.max_model_len - 1, (info.num_pages - 1) * info.page_size - 1)
    if length < 1:
        return
    chunk: list[Work] = [(0, 0, length)]
    decode: list[Work] = [(0, length, length + 1), (1, 1, 2)]
    for work, sampled in (([*chunk, (1, 0, 1)], 2), (chunk, 0), (decode, 2)):
        batch = _batch(runner, work)
        slots = np.ones((len(batch.token_ids), 1, 1), np.int32)
        batch = batch._replace(inputs={SLOTS: slots}, sample_rows=batch.sample_rows[:sampled])
        runner.submit(batch, _states(runner, work)[:sampled]).resolve()


def _states(runner: PagedRunner, work: Sequence[Work]) -> list[SampleState]:
    params = (SamplingParams(temperature=0), SamplingParams(temperature=1, top_k=50, top_p=0.9, min_p=0.01))
    return [
        SampleState(params[sequence], seed=0, prompt_ids=[], vocab_size=runner.info.vocab_size)
        for sequence, _, _ in work
    ]


def _batch(runner: PagedRunner, work: Sequence[Work], *, follows: bool = False) -> Batch:
    attention = AttentionMetadata.of(
        [(start, stop) for _, start, stop in work],
        *(_table(s.spec.num_pages, runner.info.page_size, work) for s in runner.storages),
        page_size=runner.info.page_size,
        states=StateMetadata(slots=np.array([sequence for sequence, _, _ in work], np.int32)),
    )
    return Batch(
        token_ids=np.zeros(attention.num_tokens, np.int32),
        sample_rows=attention.q_start[1:] - np.int32(1),
        attention=attention,
        sources=np.arange(len(work), dtype=np.int32) if follows else None,
    )


def _table(num_pages: int, page_size: int, work: Sequence[Work]) -> Ints:
    width = -(-max(stop for _, _, stop in work) // page_size)
    tables = np.stack([np.arange(width) % max(num_pages - 1, 1), np.full(width, num_pages - 1)])
    return tables[[sequence for sequence, _, _ in work]].astype(np.int32)
