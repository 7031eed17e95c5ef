from __future__ import annotations

from dataclasses import dataclass

from ..interface import LayerSpec
from .attention_units import CHUNK_BYTES, REDUCE_SIMDGROUPS
from .page_reader import PageReaderConfig
from .units import (
    KernelSource,
    check_dim,
    lane_dim,
    make_unit,
    norm_bits,
)

PARTS = 4
"""Number of simdgroups that share 8 rows. Each keeps a part of the queries and sums in registers."""

MAX_LATENT = 512
MAX_ROTARY = 128


def may_hold_latents(layer: LayerSpec) -> bool:
    """Return whether the kernel supports layers of this shape."""
    return layer.num_kv_heads == 1 and layer.head_dim <= MAX_LATENT and layer.value_dim <= MAX_ROTARY


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(PageReaderConfig):
    """Parameters of a compiled kernel over latents; ``value_dim`` is the width of rotary keys."""

    num_heads: int

    def __post_init__(self) -> None:
        check_dim("latents", self.layer.head_dim, MAX_LATENT)
        check_dim("rotary keys", self.layer.value_dim, MAX_ROTARY)

    @property
    def simdgroups(self) -> int:
        return PARTS * (2 if self.num_heads <= 16 else 4)

    @property
    def rows(self) -> int:
        """Number of (token, query head) pairs of a threadgroup."""
        return 8 * self.simdgroups // PARTS

    @property
    def keys(self) -> int:
        """Number of keys in a tile; two tiles fit into a GPU core's threadgroup memory."""
        return next(keys for keys in (32, 16, 8) if keys == 8 or self._bytes(keys) <= CHUNK_BYTES)

    def _bytes(self, keys: int) -> int:
        return sum(self.tile_bytes(keys)) + 32 * self.simdgroups * keys

    @property
    def _suffix(self) -> str:
        return f"latents_{self.name_with(f'h{self.num_heads}')}"

    def _macros(self) -> dict[str, int | str]:
        layer = self.layer
        latents, rotary = self.formats
        return {
            "HEAD_DIM": layer.head_dim,
            "VALUE_DIM": layer.head_dim,
            "ROTARY_DIM": layer.value_dim,
            "KEY_LANE": lane_dim(layer.head_dim),
            "VALUE_LANE": lane_dim(layer.head_dim),
            "ROTARY_LANE": lane_dim(layer.value_dim),
            "NUM_KV_HEADS": 1,
            "NUM_HEADS": self.num_heads,
            **self.visibility_macros(),
            "ROTATE_KEYS": int(latents.rotates),
            "ROTATE_VALUES": int(latents.rotates),
            "ROTATE_ROTARY": int(rotary.rotates),
            "KEY_NORM_BITS": norm_bits(layer.head_dim),
            "VALUE_NORM_BITS": norm_bits(layer.head_dim),
            "ROTARY_NORM_BITS": norm_bits(layer.value_dim),
        }

    def unit(self, kind: str) -> KernelSource:
        if kind == "reduce":
            return self._reduce_unit()
        layer, keys = self.layer, self.keys
        latent_bytes, rotary_bytes = self.tile_bytes(keys)
        row_group = 8 * (layer.head_dim + layer.value_dim + 4) * 4
        macros = self._macros() | {
            "NUM_SIMDGROUPS": self.simdgroups,
            "THREADS": 32 * self.simdgroups,
            "PARTS": PARTS,
            "KEYS": keys,
            "LATENT_QUADS": latent_bytes // 16,
            "SHARED_QUADS": max(latent_bytes + rotary_bytes, row_group) // 16,
            "UNUSED": "0xFFFFFFFFu",
        }
        return self.reading_unit(
            "latent",
            self._suffix,
            ("queries", "rotary", "items"),
            macros,
            split=kind == "split",
            shared=("rows", "attention", "tile"),
        )

    def _reduce_unit(self) -> KernelSource:
        inputs = ("rows", "partial", "stats") + (("sinks",) if self.sinks else ())
        macros = self._macros() | {"NUM_SIMDGROUPS": REDUCE_SIMDGROUPS}
        return make_unit("reduce", self._suffix, inputs, ("out",), macros, {}, ("rows", "attention"))
