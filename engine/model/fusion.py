"""Do fused operations and replayed graphs compute what separate operations would, to the bit?

Checked when a model is loaded, on its own weights: a small decode step is computed by modules that
each work for themselves, and again by fused ones from a replayed graph. What differs in a bit is turned
off for that model, saying so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from octavo.engine.model.forward import PagedModel
from octavo.kernels.metadata import AttentionMetadata

PAGE_SIZE = 8
NUM_ROWS = 3
NUM_STEPS = 3  # the first shape is seen, the second traced, the third replayed
NUM_PAGES = 1 + 2 * NUM_ROWS * NUM_STEPS


@dataclass(frozen=True, slots=True)
class FusionResult:
    """Why modules are not fused, and why graphs are not replayed; empty where they are."""

    not_fused: str = ""
    not_replayed: str = ""


def check_fusion(
    create: Callable[[bool], PagedModel], set_fused: Callable[[bool], None], vocab_size: int
) -> FusionResult:
    """``create(replay)`` gives the model with a zeroed pool of at least NUM_PAGES pages of PAGE_SIZE.
    Leaves the model fused; what to do about the result is the caller's business."""
    set_fused(False)
    try:
        wanted = _logits(create(False), vocab_size, range(NUM_STEPS - 1, NUM_STEPS))
    finally:
        set_fused(True)
    try:
        model = create(True)
        got = _logits(model, vocab_size, range(NUM_STEPS))
        if model.replay is None:
            return FusionResult(_difference(got, wanted), "the page pool does not allow it")
        if mx.array_equal(got, wanted) and model.replay.num_replayed:
            return FusionResult()
        refusal = "graphs that are replayed give other logits"
    except Exception as error:  # model code of any architecture meets tracing here
        refusal = str(error).partition("\n")[0] or type(error).__name__
    got = _logits(create(False), vocab_size, range(NUM_STEPS - 1, NUM_STEPS))
    return FusionResult(_difference(got, wanted), refusal)


def _difference(got: mx.array, wanted: mx.array) -> str:
    return "" if mx.array_equal(got, wanted) else "logits differ from those of separate modules"


def _logits(model: PagedModel, vocab_size: int, steps: range) -> mx.array:
    """Logits of the last of these steps. Every step has pages of its own, zeros before its tokens."""
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, vocab_size, (NUM_STEPS, NUM_ROWS)).astype(np.int32)
    logits = mx.array(0)
    for step in steps:
        positions = np.array([PAGE_SIZE + step, 2 * step, 3 + step], np.int32)
        firsts = 1 + 2 * (step * NUM_ROWS + np.arange(NUM_ROWS, dtype=np.int32))
        tables = np.stack([firsts, firsts + np.int32(1)], axis=1)
        slots = tables[np.arange(NUM_ROWS), positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        metadata = AttentionMetadata(
            positions=positions,
            slots=slots,
            q_start=np.arange(NUM_ROWS + 1, dtype=np.int32),
            kv_len=positions + np.int32(1),
            page_table=tables,
            page_size=PAGE_SIZE,
        )
        logits = model.forward(token_ids[step], metadata, np.arange(NUM_ROWS, dtype=np.int32))
        mx.eval(logits, *model.pool.pending())
    return logits
