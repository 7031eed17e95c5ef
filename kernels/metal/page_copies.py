"""Copies of pages inside a layer's arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from ..formats import page_format
from ..interface import PoolSpec
from .launch import KernelLibrary, Launch, padded
from .units import KernelSource, make_unit

_THREADS = 128


def copy_unit(spec: PoolSpec, layer: int, run_bytes: Mapping[str, int]) -> KernelSource:
    k_format, v_format, heads = page_format(spec.k_format), page_format(spec.v_format), spec.layers[layer]
    size, word = next(
        (size, word)
        for size, word in ((16, "uint4"), (2, "ushort"), (1, "uchar"))
        if all(run % size == 0 for run in run_bytes.values())
    )
    words = {name: run_bytes.get(name, 0) // size for name in ("k_codes", "k_scales", "v_codes", "v_scales")}
    macros: dict[str, int | str] = {
        "WORD": word,
        "THREADS": _THREADS,
        "NUM_KV_HEADS": heads.num_kv_heads,
        "KEY_CODE_WORDS": words["k_codes"],
        "KEY_SCALE_WORDS": words["k_scales"],
        "VALUE_CODE_WORDS": words["v_codes"],
        "VALUE_SCALE_WORDS": words["v_scales"],
    }
    return make_unit(
        "copy",
        f"{k_format.name}_{v_format.name}_{heads.head_dim}_{heads.value_dim}_{heads.num_kv_heads}"
        f"_{spec.page_size}",
        ("pairs", *run_bytes, *(f"to_{name}" for name in run_bytes), "after"),
        ("copied",),
        macros,
        {"Keys": k_format, "Values": v_format},
        (),
    )


def copy_pages(
    library: KernelLibrary,
    spec: PoolSpec,
    layer: int,
    parts: Mapping[str, mx.array],
    after: mx.array,
    pairs: Sequence[tuple[int, int]],
) -> mx.array:
    """Copy pages of one layer; no page is both a source and a target.

    parts   the layer's arrays [rows, width] by name
    after   output of the previous kernel on these pages; the result is this kernel's output
    """
    heads = spec.layers[layer].num_kv_heads
    run_bytes = {name: spec.page_size * array.shape[-1] * array.dtype.size for name, array in parts.items()}
    inputs = {
        "pairs": padded(np.array(pairs, np.int32).ravel()),
        **parts,
        **{f"to_{name}": array for name, array in parts.items()},
        "after": after,
    }
    launch = Launch(
        grid=(len(pairs) * _THREADS, heads, 1),
        threadgroup=(_THREADS, 1, 1),
        outputs=(((len(pairs) * heads * 8,), mx.bool_),),
    )
    return library.run(copy_unit(spec, layer, run_bytes), inputs, launch)[0]
