"""From a configuration to a runner: locate, load, probe, allocate."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import mlx.core as mx

from octavo.block_manager import PageGroup
from octavo.kernels.backends import Choice
from octavo.kernels.groups import create_pools
from octavo.kernels.interface import KVPool, LayerSpec, PoolSpec

from ...api.config import EngineConfig
from ...api.engine_info import MemoryBudget, ModelInfo
from ...api.errors import InvalidConfig
from ...memory.budget import available_memory, format_size, workspace_bytes
from ...memory.model_files import model_length, read_config, resolve_model, served_name
from ...memory.sizing import Sizing, num_pages_for, sizing, with_max_kv_size
from ..model_runner import PagedRunner
from ..paged_model import PagedModel
from ..sampling.logit_rows import NumpySampling, Sampling
from .discover import CacheLayout, discover_layout
from .loader import LoadedModel, load_model, num_weight_bytes
from .prepare import choose_device, make_ready
from .probe import ProbeResult, describe

log = logging.getLogger(__name__)


def load_paged_runner(config: EngineConfig) -> PagedRunner:
    """See ``load_runner``. What can be refused without reading the weights is refused first."""
    path = resolve_model(config.model)
    max_model_len = model_length(read_config(path), config.max_model_len, max_kv_size=config.max_kv_size)
    choice = choose_device(config)
    native = choice.backend.name == "cpu"
    loaded = load_model(path, weights=config.weights, native=native)
    probed = layout = discover_layout(loaded.model, loaded.architecture)
    if config.max_kv_size is not None:
        bounded = with_max_kv_size(layout.layers, max_kv_size=config.max_kv_size, keep=config.num_kept_tokens)
        layout = replace(layout, layers=bounded)
    size = _sizing(config, layout.layers, max_model_len)
    num_pages = _num_pages(config, size, max_model_len)
    ready = make_ready(loaded, probed, choice, exact=config.exact, fuse=config.fuse)
    result = ready.result
    log.info("%s: %s", config.model, describe(result))
    if config.residency is not None and result.tier != "paged":
        raise InvalidConfig(
            f"{loaded.architecture} runs in the {result.tier} tier, which has no 16-bit pages beside "
            "quantized ones; leave keep_fp16_pages, recent_fp16_pages and quantize_after out"
        )
    pool = _create_pool(config, choice, layout, size, num_pages)
    model = PagedModel(
        loaded.model,
        layout,
        pool,
        mask_dims=result.mask_dims,
        selection=ready.selection if result.selects_rows else None,
        replay=ready.replays,
    )
    budget = MemoryBudget(
        weights=num_weight_bytes(loaded.model, native=native),
        pages=pool.nbytes,
        workspace=workspace_bytes(
            read_config(path),
            max_step_tokens=config.max_step_tokens,
            max_running=config.max_running,
            vocab_size=layout.vocab_size,
            activation_bytes=layout.dtype.size,
        ),
    )
    mx.set_cache_limit(budget.workspace)  # what MLX may keep of freed buffers between steps
    groups = size.page_groups(num_pages)
    info = _info(config, choice, loaded, result, layout, budget, max_model_len, groups)
    return PagedRunner(
        model,
        info,
        dense_row_bytes=None if result.tier == "paged" else _dense_row_bytes(layout),
        exact=config.exact,
        chooses=ready.chooses,
        sampling=_sampling(native),
    )


def _sampling(native: bool) -> Sampling:
    if native:
        from ..sampling.native_sampling import NativeSampling

        return NativeSampling()
    return NumpySampling()


def _sizing(config: EngineConfig, layers: tuple[LayerSpec, ...], max_model_len: int) -> Sizing:
    return sizing(
        layers,
        k_format=config.page_formats.k,
        v_format=config.page_formats.v,
        page_size=config.page_size,
        max_model_len=max_model_len,
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        max_pinned=config.max_pinned_pages,
        residency=config.residency,
        num_twins=config.num_fp16_pages,
    )


def _num_pages(config: EngineConfig, size: Sizing, max_model_len: int) -> int:
    available = available_memory()
    num_pages = num_pages_for(
        size,
        kv_memory=config.kv_memory,
        num_pages=config.num_pages,
        max_running=config.max_running,
        max_model_len=max_model_len,
        available=available,
    )
    if size.bytes_for(num_pages) > available:
        raise InvalidConfig(
            f"{num_pages} pages take {format_size(size.bytes_for(num_pages))}, but only "
            f"{format_size(available)} are available; lower kv_memory or num_pages"
        )
    return num_pages


def _create_pool(
    config: EngineConfig, choice: Choice, layout: CacheLayout, size: Sizing, num_pages: int
) -> KVPool:
    spec = PoolSpec(
        layers=layout.layers,
        num_pages=num_pages,
        page_size=config.page_size,
        k_format=config.page_formats.k,
        v_format=config.page_formats.v,
    )
    try:
        pool = create_pools(
            choice.backend,
            spec,
            size.groups,
            size.pages(num_pages),
            twins=size.twins,
            twin_format="fp16" if layout.dtype == mx.float16 else "bf16",
        )
    except ValueError as error:
        raise InvalidConfig(f"{choice.backend.name} backend: {error}") from error
    predicted = size.bytes_for(num_pages)
    assert pool.nbytes == predicted, f"the pool takes {pool.nbytes} bytes, predicted were {predicted}"
    return pool


def _dense_row_bytes(layout: CacheLayout) -> int:
    """Of the largest layer's K and V, per row and visible position, in the gather tier."""
    values = max(spec.num_kv_heads * (spec.head_dim + spec.value_dim) for spec in layout.layers)
    return values * layout.dtype.size


def _info(
    config: EngineConfig,
    choice: Choice,
    loaded: LoadedModel,
    result: ProbeResult,
    layout: CacheLayout,
    budget: MemoryBudget,
    max_model_len: int,
    groups: tuple[PageGroup, ...],
) -> ModelInfo:
    return ModelInfo(
        name=served_name(config.model),
        path=resolve_model(config.model),
        architecture=loaded.architecture,
        num_layers=len(layout.layers),
        vocab_size=layout.vocab_size,
        max_model_len=max_model_len,
        tier=result.tier,
        backend=choice.backend.name,
        backend_reason=choice.reason,
        threads=config.threads or available_threads(),
        weights=loaded.weights,
        kv_format=str(config.page_formats),
        page_size=config.page_size,
        num_pages=groups[0].num_pages,
        memory=budget,
        groups=groups,
        quantize_after=config.quantize_after,
    )


def available_threads() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
