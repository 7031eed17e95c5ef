from __future__ import annotations

from collections.abc import Callable

from octavo.kernels.backends import BackendSelection
from octavo.kernels.interface import LayerSpec, PoolSpec

from ...api.config import EngineConfig
from ...api.errors import InvalidConfig
from ...memory.budget import (
    DEFAULT_SEQUENCE_TOKENS,
    SHORT_SEQUENCE_TOKENS,
    page_bytes,
    weights_bytes,
)
from ...memory.model_files import model_length, read_config, resolve_model
from ...memory.sizing import Sizing, head_layer, sizing
from ...memory.state_sizing import draft_state_bytes
from ..cache_layout import AttentionCache, CacheLayout
from ..draft_config import draft_config
from ..mtp.head import MTPRunner, load_head
from ..paged_model import PagedModel
from .discover import discover_layout
from .loader import LoadedModel, convert_weights, load_model, materialize
from .prepare import ReadyModel, model_ops


def load_mtp(
    config: EngineConfig,
    choice: BackendSelection,
    loaded: LoadedModel,
    layout: CacheLayout,
    ready: ReadyModel,
    *,
    num_pages: int,
    max_model_len: int,
) -> MTPRunner:
    """Load the MTP head of a model. Raises InvalidConfig if the model has none."""
    result = ready.result
    if not result.selects_rows:
        raise InvalidConfig(
            "speculate='mtp' needs the hidden states before the output head, which was not found in "
            f"{loaded.architecture}; choose ngram, suffix or draft:PATH"
        )
    ops, path = model_ops(choice.backend), resolve_model(config.model, config.revision)
    with ops.loading():
        head = load_head(path, loaded.model)
    if config.weights != "keep":
        convert_weights(head.body, config.weights, ops)
    materialize(head.body, ops, exact=config.exact, fuse=False)
    spec = PoolSpec(
        layers=(head_layer(layout.layers),),
        num_pages=num_pages,
        page_size=config.page_size,
        k_format=config.page_formats.k,
        v_format=config.page_formats.v,
    )
    own = CacheLayout(
        layers=spec.layers, caches=(AttentionCache(0),), dtype=layout.dtype, vocab_size=layout.vocab_size
    )
    return MTPRunner(
        head=head,
        paged=PagedModel(
            head,
            own,
            choice.backend.create_pool(spec),
            selection=ready.selection,
            row_inputs=head.body.row_inputs,
        ),
        sampling=ops.sampler(),
        num_pages=num_pages,
        page_size=config.page_size,
        max_model_len=max_model_len,
    )


def draft_weight_bytes(config: EngineConfig) -> int:
    return 0 if config.draft_model is None else weights_bytes(resolve_model(config.draft_model))


def draft_page_bytes(config: EngineConfig, layout: CacheLayout) -> Callable[[int], int]:
    if config.speculate == "mtp":
        size = page_bytes(
            [head_layer(layout.layers)],
            page_size=config.page_size,
            k_format=config.page_formats.k,
            v_format=config.page_formats.v,
        )
        return lambda num_pages: num_pages * size
    if config.draft_model is None:
        return lambda _: 0
    own = draft_config(config, num_pages=1)
    path = resolve_model(own.model, own.revision)
    loaded = load_model(path, weights="keep")
    layout = discover_layout(loaded.model, loaded.architecture)
    pages = sizing_of(own, layout.layers, model_length(read_config(path), own.max_model_len))
    states = draft_state_bytes(own, layout.slot_bytes)
    return lambda num_pages: pages.bytes_for(num_pages) + states


def sizing_of(config: EngineConfig, layers: tuple[LayerSpec, ...], max_model_len: int) -> Sizing:
    return sizing(
        layers,
        k_format=config.page_formats.k,
        v_format=config.page_formats.v,
        page_size=config.page_size,
        max_model_len=max_model_len,
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        max_pinned=config.max_pinned_pages,
        residual=config.residual,
        sequence_tokens=SHORT_SEQUENCE_TOKENS if config.num_pages else DEFAULT_SEQUENCE_TOKENS,
    )
