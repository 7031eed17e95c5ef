from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import tiny_models
from octavo.block_manager import PageCopy
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor import model_runner as paged
from octavo.engine.executor.base import RunOutput
from octavo.engine.executor.batch import Batch
from octavo.engine.executor.load import load as startup
from octavo.engine.executor.sampling.sampler import SampleState
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata, Ints

PROMPT = [7, 30, 200, 5, 99, 14, 3, 250, 41, 17, 6]
PAGE_SIZE = 8
GREEDY = SamplingParams(logprobs=0)


def i32(values: Any) -> Ints:
    return np.array(list(values), np.int32)


def state(params: SamplingParams = GREEDY, seed: int = 0) -> SampleState:
    return SampleState(params, seed=seed, prompt_ids=[], vocab_size=tiny_models.VOCAB_SIZE)


def make_batch(
    work: list[tuple[list[int], int, list[int]]], rows: list[int], copies: tuple[PageCopy, ...] = ()
) -> Batch:
    """Return a batch of ``work``: (new tokens, first position, pages) of each sequence."""
    positions = [i32(range(start, start + len(tokens))) for tokens, start, _ in work]
    width = max(len(pages) for *_, pages in work)
    table = np.zeros((len(work), width), np.int32)
    for row, (*_, pages) in zip(table, work, strict=True):
        row[: len(pages)] = pages
    slots = [
        i32(pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in own)
        for own, (*_, pages) in zip(positions, work, strict=True)
    ]
    counts = [len(tokens) for tokens, *_ in work]
    return Batch(
        token_ids=np.concatenate([i32(tokens) for tokens, *_ in work]),
        sample_rows=i32(rows),
        attention=AttentionMetadata(
            positions=np.concatenate(positions),
            q_start=i32([0, *np.cumsum(counts)]),
            kv_len=i32(start + len(tokens) for tokens, start, _ in work),
            groups=(GroupMetadata(slots=np.concatenate(slots), page_table=table),),
            page_size=PAGE_SIZE,
        ),
        copies=copies,
    )


def tokens_of(output: RunOutput) -> list[int | None]:
    return [sample.token for sample in output.samples]


def logprobs_of(output: RunOutput) -> list[float]:
    return [sample.logprob.logprob for sample in output.samples if sample.logprob is not None]


def load(folder: Path, backend: str, **settings: Any) -> paged.PagedRunner:
    pages = {"page_size": PAGE_SIZE, "num_pages": 40, "residual_pages": 0}
    settings = pages | {"max_running": 8, "max_step_tokens": 64} | settings
    return startup.load_paged_runner(EngineConfig(model=str(folder), backend=backend, **settings))  # type: ignore[arg-type]
