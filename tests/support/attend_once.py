from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from attention_cases import as_numpy, build_metadata
from octavo.kernels.cpu.backend import CpuPool
from octavo.kernels.interface import AttendOptions, LayerSpec, PoolSpec


def attend_once(
    name: str,
    rows: tuple[NDArray[np.float32], ...],
    *,
    exact: bool = False,
    scale: float = 0.1,
    stored: mx.Dtype = mx.bfloat16,
) -> NDArray[np.float32]:
    length, heads, dim = rows[1].shape
    layer = LayerSpec(num_kv_heads=heads, head_dim=dim, value_dim=dim)
    spec = PoolSpec(layers=(layer,), num_pages=-(-length // 32), page_size=32, k_format=name, v_format=name)
    pool, tables = CpuPool(spec, exact=exact), [np.arange(spec.num_pages, dtype=np.int32)]
    queries = mx.array(rows[0]).astype(mx.bfloat16)
    keys, values = (mx.array(each).astype(stored) for each in rows[1:])
    pool.begin_step(build_metadata([(0, length)], tables, 32))
    pool.write(0, keys, values)
    mx.eval(pool.pending())
    count = len(rows[0])
    pool.begin_step(build_metadata([(length - count, count)], tables, 32))
    return as_numpy(pool.attend(0, queries, AttendOptions(scale=scale)))
