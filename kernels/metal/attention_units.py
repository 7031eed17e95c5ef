from __future__ import annotations

from dataclasses import dataclass

from ..interface import LayerSpec
from .page_reader import PageReaderConfig
from .units import (
    KernelSource,
    check_dim,
    in_runs,
    lane_dim,
    loads_in_flight,
    make_unit,
    norm_bits,
    row_lanes,
)

DECODE_TILE = 32
MAX_GROUP = 16
MAX_HEADS = 2
REDUCE_SIMDGROUPS = 8
CHUNK_SIMDGROUPS = 8
CHUNK_BYTES = 28672
"""Most bytes of threadgroup memory for a chunk kernel's tile of K and V; a GPU core has about 60 KiB."""


def chunk_parts(layer: LayerSpec) -> int:
    return 2 if max(layer.head_dim, layer.value_dim) > 128 else 1


def chunk_tokens(layer: LayerSpec, group: int) -> int:
    return 8 * CHUNK_SIMDGROUPS // chunk_parts(layer) // group


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig(PageReaderConfig):
    group: int

    def __post_init__(self) -> None:
        check_dim("head_dim", self.layer.head_dim)
        check_dim("value_dim", self.layer.value_dim)
        if not 1 <= self.group <= MAX_GROUP:
            raise ValueError(
                f"query heads per KV head must be 1 to {MAX_GROUP} for the Metal kernels, got {self.group}; "
                "use --backend reference"
            )

    @property
    def slices(self) -> int:
        return -(-self.group // MAX_HEADS)

    @property
    def heads(self) -> int:
        return -(-self.group // self.slices)

    @property
    def ranges(self) -> int:
        return {1: 8, 2: 4, 3: 4}.get(self.slices, 2)

    @property
    def decode_simdgroups(self) -> int:
        return self.slices * self.ranges

    @property
    def chunk_parts(self) -> int:
        return chunk_parts(self.layer)

    @property
    def chunk_keys(self) -> int:
        products = 0 if self.chunk_parts == 1 else 32 * CHUNK_SIMDGROUPS
        return next(
            keys
            for keys in (32, 16, 8)
            if keys == 8 or sum(self.tile_bytes(keys)) + keys * products <= CHUNK_BYTES
        )

    @property
    def _values_first(self) -> bool:
        wide = max(self.layer.head_dim, self.layer.value_dim) > 128
        late = ("mxfp4", "nvfp4", "fp5") if wide else ("mxfp4", "nvfp4")
        return self.k_format in late or self.v_format in late

    @property
    def chunk_tokens(self) -> int:
        return chunk_tokens(self.layer, self.group)

    @property
    def _widest(self) -> int:
        return max(self.layer.head_dim, self.layer.value_dim)

    @property
    def _suffix(self) -> str:
        return self.name_with(f"h{self.layer.num_kv_heads}_g{self.group}")

    def _macros(self) -> dict[str, int | str]:
        layer = self.layer
        k_format, v_format = self.formats
        return {
            "HEAD_DIM": layer.head_dim,
            "VALUE_DIM": layer.value_dim,
            "KEY_LANE": lane_dim(layer.head_dim),
            "VALUE_LANE": lane_dim(layer.value_dim),
            "GROUP": self.group,
            "NUM_KV_HEADS": layer.num_kv_heads,
            "NUM_HEADS": layer.num_kv_heads * self.group,
            **self.visibility_macros(),
            "ROTATE_KEYS": int(k_format.rotates),
            "ROTATE_VALUES": int(v_format.rotates),
            "KEY_NORM_BITS": norm_bits(layer.head_dim),
            "VALUE_NORM_BITS": norm_bits(layer.value_dim),
        }

    def unit(self, kind: str) -> KernelSource:
        if kind == "reduce":
            return self._reduce_unit()
        make = self._chunk_unit if kind.endswith("chunk") else self._decode_unit
        return make(split=kind.startswith("split"))

    def _decode_unit(self, *, split: bool) -> KernelSource:
        layer = self.layer
        k_format, v_format = self.formats
        shared = max(self.group * layer.head_dim, self.decode_simdgroups // 2 * self.heads * layer.value_dim)
        macros = self._macros() | {
            "KEYS_IN_RUNS": in_runs(k_format, layer.head_dim),
            "VALUES_IN_RUNS": in_runs(v_format, layer.value_dim),
            "KEY_STAGE": loads_in_flight(k_format, layer.head_dim),
            "VALUE_STAGE": loads_in_flight(v_format, layer.value_dim),
            "WEIGHTS": min(4, row_lanes(layer.value_dim)),
            "NUM_SIMDGROUPS": self.decode_simdgroups,
            "HEADS": self.heads,
            "RANGES": self.ranges,
            "SHARED_QUADS": shared // 4,
            "PAGES_PER_TILE": max(1, DECODE_TILE // self.page_size),
        }
        return self.reading_unit(
            "decode", self._suffix, ("queries", "items"), macros, split=split, shared=("rows", "attention")
        )

    def _reduce_unit(self) -> KernelSource:
        inputs = ("rows", "partial", "stats") + (("sinks",) if self.sinks else ())
        own = ("VALUE_DIM", "VALUE_LANE", "VALUE_NORM_BITS", "NUM_HEADS", "SINKS", "SINK(head)")
        macros: dict[str, int | str] = {name: value for name, value in self._macros().items() if name in own}
        rotates_values = int(self.formats[1].rotates)
        macros |= {"ROTATE_VALUES": rotates_values, "NUM_SIMDGROUPS": REDUCE_SIMDGROUPS}
        macros |= {"WINDOW": 0, "SOFTCAP": 0}
        suffix = f"{self.layer.value_dim}_h{self.layer.num_kv_heads * self.group}" + "_r" * rotates_values
        suffix += "_s" * self.sinks
        return make_unit("reduce", suffix, inputs, ("out",), macros, {}, ("rows", "attention"))

    def _chunk_unit(self, *, split: bool) -> KernelSource:
        keys = self.chunk_keys
        key_bytes, value_bytes = self.tile_bytes(keys)
        row_group = 8 * (self._widest + 4) * 4
        shared = max(key_bytes + value_bytes, row_group)
        macros = self._macros() | {
            "NUM_SIMDGROUPS": CHUNK_SIMDGROUPS,
            "THREADS": 32 * CHUNK_SIMDGROUPS,
            "PARTS": self.chunk_parts,
            "KEYS": keys,
            "KEY_QUADS": key_bytes // 16,
            "SHARED_QUADS": shared // 16,
            "STAGED": min(CHUNK_SIMDGROUPS // self.chunk_parts, shared // row_group),
            "UNUSED": "0xFFFFFFFFu",
            "AHEAD_BYTES": 4 if self._values_first else 16,
            "VALUES_FIRST": int(self._values_first),
        }
        return self.reading_unit(
            "chunk",
            self._suffix,
            ("queries", "tiles"),
            macros,
            split=split,
            shared=("rows", "attention", "tile"),
            more=() if split else ("decoded",),
        )
