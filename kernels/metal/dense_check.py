"""Whether prompts that go densely through MLX's attention come out as from our kernel: asked at start."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..interface import AttendOptions, LayerSpec, PoolSpec
from ..metadata import AttentionMetadata
from .launch import KernelLibrary
from .pool import MetalPool

_PAGE_SIZE = 16
_EARLIER, _ROWS = 40, 64
_LAYERS = (
    LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64),
    LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64, window=48, keep=4),
)
_SCALE = 0.3
"""So large that single keys count: one that is missing is no rounding."""

LIMIT = 0.02


def dense_error(library: KernelLibrary) -> float:
    """The largest difference between the two ways, relative to the largest output, of one prompt with and
    without a window; float16. NaN where one of them is."""
    outs = []
    for dense_prompts in (0, _ROWS):
        spec = PoolSpec(layers=_LAYERS, num_pages=8, page_size=_PAGE_SIZE, k_format="fp4", v_format="fp16")
        pool = MetalPool(spec, library, dense_prompts)
        for start, stop in ((0, _EARLIER), (_EARLIER, _EARLIER + _ROWS)):
            pool.begin_step(_metadata(start, stop))
            q, k, v = (
                mx.random.normal((stop - start, heads, 64), dtype=mx.float16, key=mx.random.key(start + i))
                for i, heads in enumerate((4, 2, 2))
            )
            for layer in range(len(_LAYERS)):
                pool.write(layer, k, v)
                out = pool.attend(layer, q, AttendOptions(scale=_SCALE))
                mx.eval(out, pool.pending())
                outs.append(out.astype(mx.float32))
    half = len(outs) // 2
    ours, dense = mx.concatenate(outs[:half]), mx.concatenate(outs[half:])
    return float(mx.abs(dense - ours).max() / mx.abs(ours).max())


def _metadata(start: int, stop: int) -> AttentionMetadata:
    """A step with positions [start, stop) of one sequence, in pages 7, 6, 5, ..."""
    table = np.arange(7, 7 - -(-stop // _PAGE_SIZE), -1, dtype=np.int32)
    return AttentionMetadata.of([(start, stop)], table[None], page_size=_PAGE_SIZE)
