from __future__ import annotations

from octavo.kernels.backends import BackendSelection
from octavo.kernels.interface import PoolSpec

from ...api.config import EngineConfig
from ...api.errors import InvalidConfig
from ...memory.model_files import resolve_model
from ...memory.sizing import head_layer
from ..cache_layout import AttentionCache, CacheLayout
from ..mtp.head import MTPRunner, load_head
from ..paged_model import PagedModel
from .loader import LoadedModel, convert_weights, materialize
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
