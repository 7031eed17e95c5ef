"""Attention in float64 NumPy, dense and paged, as a reference for every kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import PageFormat, page_format
from ..interface import LayerSpec, PoolSpec
from ..metadata import AttentionMetadata, Ints
from ..residual import residual_starts

Float64s = NDArray[np.float64]


def dense_attention(
    queries: NDArray[Any],
    keys: NDArray[Any],
    values: NDArray[Any],
    positions: Ints,
    *,
    scale: float,
    window: int | None = None,
    keep: int = 0,
    chunked: bool = False,
    sinks: NDArray[Any] | None = None,
    softcap: float | None = None,
    mask: NDArray[Any] | None = None,
) -> Float64s:
    """Return attention [T, Hq, Dv] of one sequence.

    Queries [T, Hq, D] are at ``positions`` [T]; keys [L, Hkv, D] and values [L, Hkv, Dv] have L positions.
    A query at p sees position j if j <= p and (no window, or j > p - window, or j < keep). With ``chunked``,
    it sees only its own chunk of ``window`` positions.
    A ``mask`` [T, 1 or Hq, L] replaces this rule. A row that sees nothing gets zeros.
    """
    group = queries.shape[1] // keys.shape[1]
    k = np.repeat(keys.astype(np.float64), group, axis=1)
    v = np.repeat(values.astype(np.float64), group, axis=1)
    logits = np.einsum("thd,lhd->htl", queries.astype(np.float64), k) * scale
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    seen, at = np.arange(len(keys)), positions[:, None]
    visible = seen <= at
    if window is not None and chunked:
        visible &= seen // window == at // window
    elif window is not None:
        visible &= (seen > at - window) | (seen < keep)
    if mask is not None:
        rows = mask.swapaxes(0, 1)
        visible = rows if rows.dtype == bool else ~(rows <= -1e30)
        logits += 0.0 if rows.dtype == bool else np.where(visible, rows, 0.0)
    logits = np.where(visible, logits, -np.inf)
    top = np.maximum(logits.max(-1, keepdims=True), -1e300)
    sink = np.full(queries.shape[1], -np.inf) if sinks is None else sinks.astype(np.float64)
    top = np.maximum(top, sink[:, None, None])
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True) + np.exp(sink[:, None, None] - top)
    out: Float64s = np.einsum("htl,lhd->thd", weights / np.where(total == 0, 1, total), v)
    return out


def hadamard64(rows: NDArray[Any]) -> Float64s:
    """Rotate rows [..., D] in float64, as an independent check of ``formats.hadamard``."""
    matrix = np.ones((1, 1))
    while rows.shape[-1] % (2 * len(matrix)) == 0:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    blocks = rows.astype(np.float64).reshape(*rows.shape[:-1], -1, len(matrix))
    product: Float64s = (blocks @ matrix / np.sqrt(len(matrix))).reshape(rows.shape)
    return product


@dataclass(slots=True)
class StoredPart:
    """Stored K (or V) of one layer: codes and scales, each [num_pages, Hkv, page_size, width]."""

    format: PageFormat
    codes: NDArray[Any]
    scales: NDArray[Any]

    @classmethod
    def empty(cls, name: str, *, num_pages: int, num_kv_heads: int, page_size: int, dim: int) -> StoredPart:
        fmt = page_format(name)
        shape = (num_pages, num_kv_heads, page_size)
        return cls(
            fmt,
            np.zeros((*shape, fmt.codes_per_row(dim)), fmt.code_dtype),
            np.zeros((*shape, fmt.scales_per_row(dim)), fmt.scale_dtype),
        )

    def write(self, slots: Ints, rows: NDArray[Any]) -> NDArray[np.bool_]:
        """Store rows [T, Hkv, D] in their slots; return which tokens [T] were storable."""
        page, offset = np.divmod(slots, self.codes.shape[2])
        codes, scales, storable = self.format.store(rows)
        self.codes[page, :, offset] = codes
        self.scales[page, :, offset] = scales
        return np.asarray(storable.all(-1))

    def read(self, slots: Ints) -> Float64s:
        """Return the rows [L, Hkv, D] in these slots, dequantized and rotated back in float64."""
        page, offset = np.divmod(slots, self.codes.shape[2])
        rows = self.format.dequantize(self.codes[page, :, offset], self.scales[page, :, offset])
        return hadamard64(rows) if self.format.rotates else rows.astype(np.float64)


@dataclass(slots=True)
class OracleLayer:
    spec: LayerSpec
    page_size: int
    keys: StoredPart
    values: StoredPart

    def write(self, metadata: AttentionMetadata, keys: NDArray[Any], values: NDArray[Any]) -> list[int]:
        slots = metadata.only_group().slots
        stored = self.keys.write(slots, keys) & self.values.write(slots, values)
        return np.flatnonzero(~stored).tolist()

    def attend(
        self,
        metadata: AttentionMetadata,
        queries: NDArray[Any],
        *,
        scale: float,
        sinks: NDArray[Any] | None = None,
        softcap: float | None = None,
        mask: NDArray[Any] | None = None,
    ) -> Float64s:
        out = np.empty((*queries.shape[:2], self.spec.value_dim))
        for b, length in enumerate(metadata.kv_len):
            rows = slice(metadata.q_start[b], metadata.q_start[b + 1])
            slots = sequence_slots(metadata, b, int(length))
            out[rows] = dense_attention(
                queries[rows],
                self.keys.read(slots),
                self.values.read(slots),
                metadata.positions[rows],
                scale=scale,
                window=self.spec.window,
                keep=self.spec.keep,
                sinks=sinks,
                softcap=softcap,
                mask=None if mask is None else mask[rows, :, :length],
            )
        return out


def sequence_slots(metadata: AttentionMetadata, sequence: int, length: int) -> Ints:
    page, offset = np.divmod(np.arange(length, dtype=np.int32), np.int32(metadata.page_size))
    table = metadata.only_group().page_table[sequence]
    return np.asarray(table[page] * metadata.page_size + offset, np.int32)


@dataclass(slots=True)
class OraclePool:
    """The pages of every layer of a pool, initially zero."""

    spec: PoolSpec
    layers: list[OracleLayer] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        self.layers = []
        for layer in spec.layers:
            parts = [
                StoredPart.empty(
                    name,
                    num_pages=spec.num_pages,
                    num_kv_heads=layer.num_kv_heads,
                    page_size=spec.page_size,
                    dim=dim,
                )
                for name, dim in ((spec.k_format, layer.head_dim), (spec.v_format, layer.value_dim))
            ]
            self.layers.append(OracleLayer(layer, spec.page_size, parts[0], parts[1]))


Parts = tuple[StoredPart, StoredPart]


def attend_residual(
    pages: AttentionMetadata,
    residual: AttentionMetadata,
    stored: tuple[Parts, Parts],
    queries: NDArray[Any],
    *,
    layer: LayerSpec,
    residual_layer: LayerSpec,
    mask: NDArray[Any] | None = None,
    **options: Any,
) -> Float64s:
    """Return attention over quantized and residual pages, computed row by row.

    pages, residual   the step's metadata for quantized pages, and for residual pages
    stored            K and V in quantized pages, then K and V in residual pages
    layer             its window and ``keep`` are the positions that a row sees
    residual_layer    its window and ``keep`` are the positions that a row reads from residual pages
    """
    assert residual_layer.window is not None
    starts = residual.only_group().starts
    if starts is None:
        starts = residual_starts(pages.positions, window=residual_layer.window, page_size=pages.page_size)
    out = np.empty((*queries.shape[:2], layer.value_dim))
    for b, length in enumerate(pages.kv_len.tolist()):
        quantized, whole = (
            [part.read(sequence_slots(metadata, b, length)) for part in parts]
            for metadata, parts in zip((pages, residual), stored, strict=True)
        )
        seen = np.arange(length)
        for t in range(pages.q_start[b], pages.q_start[b + 1]):
            at = pages.positions[t : t + 1]
            in_16_bits = ((seen >= starts[t]) | (seen < residual_layer.keep))[:, None, None]
            keys, values = (np.where(in_16_bits, *both) for both in zip(whole, quantized, strict=True))
            out[t : t + 1] = dense_attention(
                queries[t : t + 1],
                keys,
                values,
                at,
                window=layer.window,
                keep=layer.keep,
                mask=None if mask is None else mask[t : t + 1, :, :length],
                **options,
            )
    return out
