"""Loading a model's head for multi-token prediction, with a page pool for its layer."""

from __future__ import annotations

from octavo.kernels.backends import Choice
from octavo.kernels.interface import LayerSpec, PoolSpec

from ...api.config import EngineConfig
from ...api.errors import InvalidConfig
from ...memory.model_files import resolve_model
from ..model_ops import model_ops
from ..mtp.head import load_head
from ..mtp.runner import MTPRunner
from ..paged_model import PagedModel
from .discover import AttentionCache, CacheLayout
from .loader import LoadedModel, convert_weights, materialize
from .prepare import ReadyModel


def load_mtp(
    config: EngineConfig,
    choice: Choice,
    loaded: LoadedModel,
    layout: CacheLayout,
    ready: ReadyModel,
    *,
    num_pages: int,
    max_model_len: int,
) -> MTPRunner:
    """The head of a model that is ready. InvalidConfig if it has none, or cannot be served with it."""
    result = ready.result
    if result.tier != "paged" or not result.selects_rows:
        why = result.reason or "its output head, and what that gets, was not found"
        raise InvalidConfig(
            f"speculate='mtp' needs {loaded.architecture}'s attention to read pages, and its hidden states: "
            f"{why}; choose ngram, suffix or draft:PATH"
        )
    ops, path = model_ops(choice.backend), resolve_model(config.model, config.revision)
    with ops.loading():
        head = load_head(path, loaded.model)
    if config.weights != "keep":
        with ops.quantizing():
            convert_weights(head.body, config.weights)
    materialize(head.body, ops, exact=config.exact, fuse=False)
    spec = PoolSpec(
        layers=(head_layer(layout),),
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
        paged=PagedModel(head, own, choice.backend.create_pool(spec), selection=ready.selection),
        sampling=ops.sampler(),
        num_pages=num_pages,
        page_size=config.page_size,
        max_model_len=max_model_len,
    )


def head_layer(layout: CacheLayout) -> LayerSpec:
    """What the head's layer caches: as the model's last one without a window."""
    return next((layer for layer in reversed(layout.layers) if layer.window is None), layout.layers[-1])
