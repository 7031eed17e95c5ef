"""Attention over quantized pages and their residual pages in one native call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from .. import _ext
from ..interface import AttendOptions
from ..masks import check_mask
from ..metadata import AttentionMetadata
from ..residual_cache import ResidualCache

if TYPE_CHECKING:
    from .backend import CpuPool


class CpuResidualCache(ResidualCache["CpuPool"]):
    """Attends over both pools with the kernels of their formats and joins the partial results."""

    quantized: CpuPool
    residual: CpuPool

    def begin_step(self, metadata: AttentionMetadata) -> None:
        metadata = self._begin(metadata)
        pages, residual = metadata.groups
        self.quantized.begin_group(metadata, pages)
        self.residual.begin_group(metadata, residual)

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        quantized, residual = self.quantized, self.residual
        step, spec, beside = quantized.step, quantized.spec.layers[layer], residual.spec.layers[layer]
        if queries.shape[0] != step.num_tokens:
            raise ValueError(f"queries must have the step's {step.num_tokens} rows, got {queries.shape}")
        mask = check_mask(
            options.mask, tokens=step.num_tokens, num_heads=queries.shape[1], length=step.longest
        )
        return _ext.attend_residual(
            *quantized.pages(layer),
            *residual.pages(layer),
            _ext.shortcut(queries),
            step.page_table,
            residual.step.page_table,
            step.q_start,
            step.kv_len,
            residual.step.starts,
            options.scale,
            spec.window or 0,
            spec.keep,
            beside.window or 0,
            beside.keep,
            options.softcap or 0.0,
            options.sinks,
            mask,
            options.rotary,
            quantized.exact,
        )
