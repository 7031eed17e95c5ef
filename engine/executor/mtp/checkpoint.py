"""Reading of MTP heads from checkpoints. mlx-lm does not load them.

Two layouts are known, as in vLLM and SGLang. N is ``num_hidden_layers``. Only the first head is read:

    DeepSeek-V3, GLM-4.5  ``model.layers.N.``: enorm, hnorm, eh_proj, shared_head.norm, a decoder layer
    Qwen3-Next, Qwen3.5   ``mtp.``: pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm, layers.0;
                          norms store their weights minus one
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from ...api.errors import InvalidConfig
from ...memory.budget import tensors_of
from ...memory.configuration import text_config
from ...memory.weight_files import weight_files


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    prefix: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    layer: str = ""
    shared: tuple[str, ...] = ()
    shifted: bool = False


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Weights of a head for multi-token prediction.

    ``projection`` [D, 2 D] applies to the embedding followed by the hidden state.
    """

    embedding_norm: mx.array
    hidden_norm: mx.array
    projection: mx.array
    norm: mx.array
    layer: dict[str, mx.array] = field(default_factory=dict)
    layer_norms: dict[str, mx.array] = field(default_factory=dict)


def find_layout(names: Iterable[str], config: Mapping[str, Any]) -> Layout | None:
    layers = int(text_config(config).get("num_hidden_layers") or 0)
    deepseek = Layout(
        prefix=f"model.layers.{layers}.",
        embedding_norm="enorm.weight",
        hidden_norm="hnorm.weight",
        projection="eh_proj.weight",
        norm="shared_head.norm.weight",
        shared=("embed_tokens.", "shared_head.head."),
    )
    qwen = Layout(
        prefix="mtp.",
        embedding_norm="pre_fc_norm_embedding.weight",
        hidden_norm="pre_fc_norm_hidden.weight",
        projection="fc.weight",
        norm="norm.weight",
        layer="layers.0.",
        shifted=True,
    )
    found = set(names)
    return next((each for each in (deepseek, qwen) if each.prefix + each.projection in found), None)


def read_head(path: Path, config: Mapping[str, Any]) -> HeadWeights:
    """Return the head's tensors, not evaluated. Raises InvalidConfig if there is no complete head."""
    files = weight_files(path)
    layout = find_layout((name for file in files for name in tensors_of(file)), config)
    if layout is None:
        raise InvalidConfig(
            f"speculate='mtp' needs a head for multi-token prediction, and {path} has none; many converted "
            "checkpoints lack the head, so use the original weights, or choose ngram, suffix or draft:PATH"
        )
    found: dict[str, mx.array] = {}
    for file in files:
        if any(name.startswith(layout.prefix) for name in tensors_of(file)):
            tensors = cast("dict[str, mx.array]", mx.load(str(file)))
            found |= {
                name.removeprefix(layout.prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(layout.prefix)
            }
    try:
        return _sorted(found, layout)
    except KeyError as missing:
        raise InvalidConfig(
            f"the head for multi-token prediction in {path} has no {layout.prefix}{missing.args[0]}; "
            "download the weights again, or choose ngram, suffix or draft:PATH"
        ) from None


def _sorted(found: dict[str, mx.array], layout: Layout) -> HeadWeights:
    own = layout.embedding_norm, layout.hidden_norm, layout.norm
    norms = [_unshifted(found.pop(name), layout) for name in own]
    projection = found.pop(layout.projection)
    layer = {
        name.removeprefix(layout.layer): tensor
        for name, tensor in found.items()
        if name.startswith(layout.layer) and not name.startswith(layout.shared)
    }
    layer_norms = {
        name: _unshifted(layer.pop(name), layout) for name in list(layer) if name.endswith("norm.weight")
    }
    return HeadWeights(norms[0], norms[1], projection, norms[2], layer, layer_norms)


def _unshifted(weight: mx.array, layout: Layout) -> mx.array:
    return weight + 1.0 if layout.shifted else weight
