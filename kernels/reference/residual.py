"""Attention over quantized pages and their 16-bit twins on plain MLX operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..interface import LayerSpec
from ..metadata import AttentionMetadata
from ..residual import MixedPool, twin_starts
from .attention import Bias, Group, softmax
from .backend import ReferencePool


class ReferenceMixedPool(MixedPool[ReferencePool]):
    """Both kinds of rows are gathered; of each logit and each value the one that the query reads counts."""

    _starts: mx.array  # [T, layers]

    def begin_step(self, metadata: AttentionMetadata) -> None:
        super().begin_step(metadata)
        counts = np.diff(metadata.q_start)
        after = (
            np.zeros(len(counts), np.int32) if metadata.quantize_after is None else metadata.quantize_after
        )
        windows = np.array([layer.window for layer in self.twins.spec.layers], np.int32)
        self._starts = mx.array(
            twin_starts(
                metadata.positions[:, None],
                np.repeat(after, counts)[:, None],
                window=windows,
                page_size=metadata.page_size,
            )
        )

    def attend(
        self,
        layer: int,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        softcap: float | None = None,
        alibi_slopes: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> mx.array:
        bias = self.quantized.check_queries(layer, queries, alibi_slopes, mask)
        wide = queries.astype(mx.float32) * scale
        keep = self.twins.spec.layers[layer].keep
        outs = []
        for group, twins in zip(self.quantized.groups, self.twins.groups, strict=True):
            tables = (group.tables, twins.tables)
            keys, values = (
                [pool.rows(layer, part, table) for pool, table in zip(self._pools, tables, strict=True)]
                for part in (0, 1)
            )
            seen = mx.arange(keys[0].shape[2])
            reads_twin = (seen >= self._starts[group.rows, layer][..., None]) | (seen < keep)
            outs.append(
                _attend_group(
                    group,
                    wide[group.rows],
                    keys,
                    values,
                    reads_twin,
                    spec=self.quantized.spec.layers[layer],
                    sinks=sinks,
                    softcap=softcap,
                    bias=bias,
                )
            )
        return mx.concatenate(outs)[self.quantized.restore_order].astype(queries.dtype)

    @property
    def _pools(self) -> tuple[ReferencePool, ReferencePool]:
        return self.quantized, self.twins


def _attend_group(
    group: Group,
    queries: mx.array,
    keys: list[mx.array],
    values: list[mx.array],
    reads_twin: mx.array,
    *,
    spec: LayerSpec,
    sinks: mx.array | None,
    softcap: float | None,
    bias: Bias,
) -> mx.array:
    """As ``attend_group``, with K and V of both kinds (quantized, twins); ``reads_twin`` [B, n, L] says
    which of them each row reads at each position."""
    sequences, n, num_heads, _ = queries.shape
    kv_heads, shared, length = spec.num_kv_heads, num_heads // spec.num_kv_heads, keys[0].shape[2]
    folded = queries.reshape(sequences, n, kv_heads, shared, -1).transpose(0, 2, 3, 1, 4)
    folded = folded.reshape(sequences, kv_heads, shared * n, -1)
    logits = [(folded @ k.swapaxes(-1, -2)).reshape(sequences, kv_heads, shared, n, length) for k in keys]
    chosen = reads_twin[:, None, None]
    joined = mx.where(chosen, logits[1], logits[0])
    if softcap is not None:
        joined = softcap * mx.tanh(joined / softcap)
    joined = bias.hide(bias.add_slopes(joined, group), group, spec)
    weights = softmax(joined, None if sinks is None else sinks.reshape(1, kv_heads, shared, 1, 1))
    out = mx.zeros((sequences, kv_heads, shared * n, values[0].shape[-1]))
    for reads, rows in zip((mx.logical_not(reads_twin), reads_twin), values, strict=True):
        part = mx.where(reads[:, None, None], weights, 0.0).reshape(*out.shape[:3], length)
        wanted = (part != 0).any(axis=2)  # the others may be somebody else's: 0 * NaN is NaN
        out = out + part @ mx.where(wanted[..., None], rows, 0.0)
    out = out.reshape(sequences, kv_heads, shared, n, -1).transpose(0, 3, 1, 2, 4)
    return out.reshape(sequences * n, num_heads, -1)
