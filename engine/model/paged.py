"""The runner: a hooked model, its page pool, and one forward with its draws per step."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from octavo.engine.batch import Batch
from octavo.engine.config import EngineConfig
from octavo.engine.errors import InvalidConfig
from octavo.engine.info import MemoryBudget, ModelInfo
from octavo.engine.memory import available_memory, num_pages_for, page_bytes, workspace_bytes
from octavo.engine.model.forward import PagedModel, slice_rows
from octavo.engine.model.head import select_rows
from octavo.engine.model.layers import discover_layout
from octavo.engine.model.loader import LoadedModel, load_model
from octavo.engine.model.locate import model_length, read_config, resolve_model
from octavo.engine.model.probe import ProbeResult, describe, probe
from octavo.engine.runner import RunOutput
from octavo.engine.sampler import Sampled, SampleState, sample
from octavo.engine.truncation import Floats
from octavo.kernels.backends import Choice, choose_backend
from octavo.kernels.interface import KVPool, LayerSpec, PoolSpec
from octavo.kernels.metadata import Ints

log = logging.getLogger(__name__)

KV_NOT_FINITE = "the model computed keys or values that are not finite (NaN or infinity)"
GATHER_BYTES = 256 * 1024**2  # dense K/V of one layer that the gather tier holds at once


class PagedRunner:
    """``ModelRunner`` over a page pool.

    ``dense_row_bytes`` is what one row of one layer takes per visible position in the gather
    tier (None: paged tier): a step is then computed in slices of rows that stay below
    GATHER_BYTES.
    """

    def __init__(self, model: PagedModel, info: ModelInfo, *, dense_row_bytes: int | None) -> None:
        self._model = model
        self._info = info
        self._dense_row_bytes = dense_row_bytes

    @property
    def info(self) -> ModelInfo:
        return self._info

    def run(self, batch: Batch, states: Sequence[SampleState]) -> RunOutput:
        """As ``ModelRunner.run``. Raises ValueError for token ids or pages that do not exist:
        neither the embedding nor the kernels check."""
        metadata, vocab_size = batch.attention, self._info.vocab_size
        low, high = int(batch.token_ids.min()), int(batch.token_ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"token ids must lie in [0, {vocab_size}), got values from {low} to {high}")
        pool = self._model.pool
        if batch.copies:
            pool.copy_pages([(copy.source, copy.target) for copy in batch.copies])
        rows, which = np.unique(batch.sample_rows, return_inverse=True)
        logits: list[mx.array] = []
        failed: list[int] = []
        for first, stop in self._slices(batch):
            wanted = rows[(rows >= first) & (rows < stop)] - first
            part = slice_rows(metadata, first, stop)
            out = self._model.forward(
                batch.token_ids[first:stop], part, wanted if len(wanted) else np.zeros(1, np.int32)
            )
            if len(wanted):
                logits.append(out)
            # Rows nobody samples from need no logits: left out here, their head is never computed.
            mx.eval(logits[-1:] if len(wanted) else [], *pool.pending())
            failed += [first + row for row in pool.nonfinite_tokens()]
        distinct = [row for part_logits in logits for row in _float_rows(part_logits)]
        samples = sample((distinct[i] for i in which), states)
        return RunOutput(_with_failures(samples, batch, failed), tuple(failed))

    def _slices(self, batch: Batch) -> Iterator[tuple[int, int]]:
        total = len(batch.token_ids)
        size = total
        if self._dense_row_bytes is not None:
            size = max(1, GATHER_BYTES // (self._dense_row_bytes * int(batch.attention.kv_len.max())))
        for first in range(0, total, size):
            yield first, min(first + size, total)

    def close(self) -> None:
        """Drop the weights and the pool; the runner must not be used afterwards."""
        del self._model
        mx.clear_cache()


def load_paged_runner(config: EngineConfig) -> PagedRunner:
    """Choose the backend, load, probe, allocate, in that order; see ``load_runner``."""
    path = resolve_model(config.model)
    max_model_len = model_length(read_config(path), config.max_model_len)
    try:
        choice = choose_backend(config.backend, config.threads)
    except ValueError as error:
        raise InvalidConfig(str(error)) from error
    if not mx.metal.is_available():
        mx.set_default_device(mx.cpu)
    loaded = load_model(
        path,
        weights=config.weights,
        native=choice.backend.name == "cpu",
        exact=config.exact,
        fuse=config.fuse,
    )
    layout = discover_layout(loaded.model, loaded.architecture)
    selection = select_rows(loaded.model, vocab_size=layout.vocab_size)
    result = probe(loaded.model, layout, choice.backend, selection, architecture=loaded.architecture)
    log.info("%s: %s", config.model, describe(result))
    pool = _create_pool(config, choice, layout.layers, max_model_len)
    model = PagedModel(
        loaded.model,
        layout,
        pool,
        gather=result.tier == "gather",
        selection=selection if result.selects_rows else None,
    )
    workspace = workspace_bytes(
        read_config(path),
        max_step_tokens=config.max_step_tokens,
        max_running=config.max_running,
        vocab_size=layout.vocab_size,
        activation_bytes=layout.dtype.size,
    )
    mx.set_cache_limit(workspace)
    sizes = _Sizes(loaded.num_bytes, pool.nbytes, workspace, layout.vocab_size, max_model_len)
    info = _info(config, choice, loaded, result, pool.spec, sizes)
    dense = max(spec.num_kv_heads * (spec.head_dim + spec.value_dim) for spec in layout.layers)
    gather = result.tier == "gather"
    return PagedRunner(model, info, dense_row_bytes=dense * layout.dtype.size if gather else None)


@dataclass(frozen=True, slots=True)
class _Sizes:
    weights: int
    pages: int
    workspace: int
    vocab_size: int
    max_model_len: int


def _create_pool(
    config: EngineConfig, choice: Choice, layers: tuple[LayerSpec, ...], max_model_len: int
) -> KVPool:
    bytes_per_page = page_bytes(
        layers, page_size=config.page_size, k_format=config.kv_format, v_format=config.kv_format
    )
    available = available_memory()
    num_pages = num_pages_for(
        bytes_per_page=bytes_per_page,
        page_size=config.page_size,
        kv_memory=config.kv_memory,
        num_pages=config.num_pages,
        max_running=config.max_running,
        max_model_len=max_model_len,
        available=available,
    )
    if num_pages * bytes_per_page > available:
        raise InvalidConfig(
            f"{num_pages} pages take {num_pages * bytes_per_page} bytes, but only {available} are available; "
            "lower kv_memory or num_pages"
        )
    spec = PoolSpec(
        layers=layers,
        num_pages=num_pages,
        page_size=config.page_size,
        k_format=config.kv_format,
        v_format=config.kv_format,
    )
    try:
        pool = choice.backend.create_pool(spec)
    except ValueError as error:
        raise InvalidConfig(f"{choice.backend.name} backend: {error}") from error
    assert pool.nbytes == num_pages * bytes_per_page, (
        f"pool of {pool.nbytes} bytes, {bytes_per_page} per page"
    )
    return pool


def _info(
    config: EngineConfig,
    choice: Choice,
    loaded: LoadedModel,
    result: ProbeResult,
    pool: PoolSpec,
    sizes: _Sizes,
) -> ModelInfo:
    return ModelInfo(
        name=config.model,
        path=resolve_model(config.model),
        architecture=loaded.architecture,
        num_layers=len(pool.layers),
        vocab_size=sizes.vocab_size,
        max_model_len=sizes.max_model_len,
        tier=result.tier,
        backend=choice.backend.name,
        backend_reason=choice.reason,
        threads=config.threads or available_threads(),
        weights=loaded.weights,
        kv_format=config.kv_format,
        page_size=config.page_size,
        num_pages=pool.num_pages,
        memory=MemoryBudget(weights=sizes.weights, pages=sizes.pages, workspace=sizes.workspace),
    )


def available_threads() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _float_rows(logits: mx.array) -> Iterator[Floats]:
    """Evaluated logits [S, V] row by row as float32, without a float32 copy of all of them:
    the upper half of a float32 is a bfloat16."""
    if logits.dtype == mx.bfloat16:
        for bits in np.array(logits.view(mx.uint16), copy=False):
            yield (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        yield from np.array(logits.astype(mx.float32))


def _with_failures(samples: list[Sampled], batch: Batch, failed: list[int]) -> tuple[Sampled, ...]:
    """Samples of sequences that own a failed row become failures themselves."""
    if not failed:
        return tuple(samples)
    starts = batch.attention.q_start[1:]
    broken = set(np.searchsorted(starts, failed, side="right").tolist())
    owners: Ints = np.searchsorted(starts, batch.sample_rows, side="right").astype(np.int32)
    return tuple(
        Sampled(token=None, error=KV_NOT_FINITE) if int(owner) in broken else drawn
        for drawn, owner in zip(samples, owners, strict=True)
    )
