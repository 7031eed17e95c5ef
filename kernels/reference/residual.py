from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from ..interface import AttendOptions, LayerSpec
from ..metadata import AttentionMetadata
from ..residual_cache import ResidualCache
from .attention import Bias, EqualRows, attention_weights

if TYPE_CHECKING:
    from .backend import ReferencePool


class ReferenceResidualCache(ResidualCache["ReferencePool"]):
    """Reads both kinds of pages, and selects one kind for each pair of query and position."""

    _starts: mx.array

    def begin_step(self, metadata: AttentionMetadata) -> None:
        super().begin_step(metadata)
        self._starts = mx.array(self.starts())

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        bias = self.quantized.check_queries(layer, queries, options)
        wide = queries.astype(mx.float32) * options.scale
        if options.rotary is not None:
            self.quantized.check_latents(layer, queries, options)
            wide = mx.concatenate([wide, options.rotary.astype(mx.float32)], axis=-1)
        keep = self.residual.spec.layers[layer].keep
        outs = []
        for group, residual_group in zip(self.quantized.groups, self.residual.groups, strict=True):
            tables = (group.tables, residual_group.tables)
            keys, values = (
                [pool.rows(layer, part, table) for pool, table in zip(self._pools, tables, strict=True)]
                for part in (0, 1)
            )
            if options.rotary is not None:
                latents = keys
                keys = [mx.concatenate(list(pair), axis=-1) for pair in zip(latents, values, strict=True)]
                values = latents
            seen = mx.arange(keys[0].shape[2])
            reads_residual = (seen >= self._starts[group.rows][..., None]) | (seen < keep)
            outs.append(
                _attend_group(
                    group,
                    wide[group.rows],
                    keys,
                    values,
                    reads_residual,
                    spec=self.quantized.spec.layers[layer],
                    options=options,
                    bias=bias,
                )
            )
        return mx.concatenate(outs)[self.quantized.restore_order].astype(queries.dtype)

    @property
    def _pools(self) -> tuple[ReferencePool, ReferencePool]:
        return self.quantized, self.residual


def _attend_group(
    group: EqualRows,
    queries: mx.array,
    keys: list[mx.array],
    values: list[mx.array],
    reads_residual: mx.array,
    *,
    spec: LayerSpec,
    options: AttendOptions,
    bias: Bias,
) -> mx.array:
    sequences, n, num_heads, _ = queries.shape
    kv_heads, shared, length = spec.num_kv_heads, num_heads // spec.num_kv_heads, keys[0].shape[2]
    folded = queries.reshape(sequences, n, kv_heads, shared, -1).transpose(0, 2, 3, 1, 4)
    folded = folded.reshape(sequences, kv_heads, shared * n, -1)
    logits = [(folded @ k.swapaxes(-1, -2)).reshape(sequences, kv_heads, shared, n, length) for k in keys]
    chosen = reads_residual[:, None, None]
    joined = mx.where(chosen, logits[1], logits[0])
    weights = attention_weights(joined, group, spec=spec, options=options, bias=bias)
    out = mx.zeros((sequences, kv_heads, shared * n, values[0].shape[-1]))
    for reads, rows in zip((mx.logical_not(reads_residual), reads_residual), values, strict=True):
        part = mx.where(reads[:, None, None], weights, 0.0).reshape(*out.shape[:3], length)
        wanted = (part != 0).any(axis=2)  # other rows may have NaN of other sequences, and 0 * NaN is NaN
        out = out + part @ mx.where(wanted[..., None], rows, 0.0)
    out = out.reshape(sequences, kv_heads, shared, n, -1).transpose(0, 3, 1, 2, 4)
    return out.reshape(sequences * n, num_heads, -1)
