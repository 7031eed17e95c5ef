from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from ..interface import AttendOptions
from ..metadata import AttentionMetadata
from ..residual_cache import ResidualCache
from .attention import attend_group

if TYPE_CHECKING:
    from .backend import ReferencePool  # noqa: F401


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
        spec, keep = self.quantized.spec.layers[layer], self.residual.spec.layers[layer].keep
        outs = []
        for group, residual_group in zip(self.quantized.groups, self.residual.groups, strict=True):
            keys, values = (
                [
                    self.quantized.rows(layer, part, group.tables),
                    self.residual.rows(layer, part, residual_group.tables),
                ]
                for part in (0, 1)
            )
            if options.rotary is not None:
                pairs = zip(keys, values, strict=True)
                values, keys = keys, [mx.concatenate([*pair], axis=-1) for pair in pairs]
            seen = mx.arange(keys[0].shape[2])
            reads = (seen >= self._starts[group.rows][..., None]) | (seen < keep)
            kinds = list(zip((mx.logical_not(reads), reads), keys, values, strict=True))
            outs.append(attend_group(group, wide[group.rows], kinds, spec=spec, options=options, bias=bias))
        return mx.concatenate(outs)[self.quantized.restore_order].astype(queries.dtype)
