"""Check that fused operations and replayed graphs give bit-identical results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from octavo.kernels.metadata import AttentionMetadata, Ints, StateMetadata

from ..batch import Batch, OutputSelection
from ..paged_model import PagedModel
from ..recurrent.state_pool import StatePool
from .probe_steps import PAGE_SIZE

NUM_ROWS = 3
NUM_STEPS = 2
LAST = range(NUM_STEPS - 1, NUM_STEPS)
ROWS: Ints = np.arange(NUM_ROWS, dtype=np.int32)
FIRST_POSITIONS: Ints = np.array([PAGE_SIZE, 0, 3], np.int32)
NUM_PAGES = 1 + 2 * NUM_ROWS * NUM_STEPS


@dataclass(frozen=True, slots=True)
class FusionResult:
    not_fused: str = ""
    not_replayed: str = ""
    stores_logits: str = ""


def check_fusion(
    create: Callable[[bool], PagedModel], set_fused: Callable[[bool], None], vocab_size: int
) -> FusionResult:
    set_fused(False)
    try:
        expected = _logits(create(False), vocab_size, LAST)
    finally:
        set_fused(True)
    result = _check_logits(create, vocab_size, expected)
    if result.not_fused:
        return replace(result, stores_logits="modules are not fused")
    stores_logits = _check_greedy(create(not result.not_replayed), vocab_size, expected)
    return replace(result, stores_logits=stores_logits)


def _check_logits(create: Callable[[bool], PagedModel], vocab_size: int, expected: mx.array) -> FusionResult:
    try:
        model = create(True)
        got = _logits(model, vocab_size, range(NUM_STEPS))
        if model.graph_runner is None:
            by_operations = model.states is not None and model.kv_cache.replayable
            reason = (
                "MLX operations write some states" if by_operations else "the page pool does not allow it"
            )
            return FusionResult(_difference(got, expected), reason)
        if mx.array_equal(got, expected) and model.graph_runner.num_replayed:
            return FusionResult()
        refusal = "replayed graphs compute different logits"
    except Exception as error:  # model code may raise anything
        refusal = str(error).partition("\n")[0] or type(error).__name__
    return FusionResult(_difference(_logits(create(False), vocab_size, LAST), expected), refusal)


def _check_greedy(model: PagedModel, vocab_size: int, expected: mx.array) -> str:
    try:
        _make_strict(model)
        ids, logits = mx.array(0), mx.array(0)
        for step in _steps(model, vocab_size, range(NUM_STEPS)):
            ids, logits = model.forward(step, OutputSelection(ROWS, greedy=True)).arrays
            model.evaluate([ids, logits])
    except Exception as error:  # model code may raise anything
        return str(error).partition("\n")[0] or type(error).__name__
    rows = np.array(expected.astype(mx.float32))
    tops = rows.argmax(-1)
    same = np.array_equal(ids, tops) and np.array_equal(logits, rows[ROWS, tops])
    return "" if same else "the output head chooses tokens that differ from the largest logits"


def _difference(got: mx.array, expected: mx.array) -> str:
    return "" if mx.array_equal(got, expected) else "logits of fused and separate modules differ"


def _logits(model: PagedModel, vocab_size: int, steps: range) -> mx.array:
    _make_strict(model)
    logits = mx.array(0)
    for step in _steps(model, vocab_size, steps):
        (logits,) = model.forward(step, OutputSelection(ROWS)).arrays
        model.evaluate([logits])
    return logits


def _make_strict(model: PagedModel) -> None:
    if model.graph_runner is not None:
        model.graph_runner.strict = True


def _steps(model: PagedModel, vocab_size: int, steps: range) -> Iterator[Batch]:
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, vocab_size, (NUM_STEPS, NUM_ROWS)).astype(np.int32)
    if model.states is not None:
        steps = range(NUM_STEPS)
        _begin_states(model.states)
    for step in steps:
        firsts = 1 + 2 * (step * NUM_ROWS + np.arange(NUM_ROWS, dtype=np.int32))
        metadata = AttentionMetadata.of(
            [(position + step, position + step + 1) for position in FIRST_POSITIONS.tolist()],
            np.stack([firsts, firsts + np.int32(1)], axis=1),
            page_size=PAGE_SIZE,
            states=StateMetadata(slots=ROWS),
        )
        yield Batch(token_ids[step], ROWS, metadata)


def _begin_states(states: StatePool) -> None:
    data = np.zeros((NUM_ROWS, states.snapshot_bytes), np.uint8)
    data[:, -8:] = FIRST_POSITIONS.astype("<i8")[:, None].view(np.uint8)
    states.write_pages(ROWS.tolist(), data)
