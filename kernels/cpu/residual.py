"""Attention over quantized pages and their 16-bit twins in one native call."""

from __future__ import annotations

import mlx.core as mx

from .. import _ext
from ..masks import check_mask
from ..residual import MixedPool
from .backend import CpuPool


class CpuMixedPool(MixedPool[CpuPool]):
    """Each pool is attended over by the kernels of its formats; their partial results are joined."""

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
        quantized, twins = self.quantized, self.twins
        step, spec, twin = quantized.step, quantized.spec.layers[layer], twins.spec.layers[layer]
        if queries.shape[0] != step.num_tokens:
            raise ValueError(f"queries must have the step's {step.num_tokens} rows, got {queries.shape}")
        mask = check_mask(mask, tokens=step.num_tokens, num_heads=queries.shape[1], length=step.longest)
        return _ext.attend_mixed(
            *quantized.pages(layer),
            *twins.pages(layer),
            _ext.shortcut(queries),
            step.page_table,
            twins.step.page_table,
            step.q_start,
            step.kv_len,
            step.quantize_after,
            scale,
            spec.window or 0,
            spec.keep,
            twin.window or 0,
            twin.keep,
            softcap or 0.0,
            sinks,
            alibi_slopes,
            mask,
            quantized.exact,
        )
