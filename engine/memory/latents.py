"""Pages of latent attention (MLA): latents and rotary keys instead of K and V of every head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.kernels.interface import LayerSpec

from .configuration import text_config

_DIMS = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_BYTES = 2  # bytes of a 16-bit value


@dataclass(frozen=True, slots=True)
class LatentCaches:
    """Layers that cache latents, with bytes per token in 16 bits of all of them, and of K and V of every
    head."""

    layers: int
    bytes_per_token: int
    dense_bytes_per_token: int


def latent_caches(layers: Sequence[LayerSpec], config: Mapping[str, Any]) -> LatentCaches | None:
    """Return the latent caches of observed layers; None if no layer caches latents, or config.json lacks the
    sizes of its heads."""
    flat = text_config(config)
    shape = (flat.get("kv_lora_rank"), flat.get("qk_rope_head_dim"))
    latent = [spec for spec in layers if spec.num_kv_heads == 1 and (spec.head_dim, spec.value_dim) == shape]
    if not latent or any(not isinstance(flat.get(name), int) for name in _DIMS):
        return None
    heads, *dims = (int(flat[name]) for name in _DIMS)
    own = sum(_BYTES * (spec.head_dim + spec.value_dim) for spec in latent)
    return LatentCaches(len(latent), own, len(latent) * _BYTES * heads * sum(dims))
