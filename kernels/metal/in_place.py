"""Pages written in place on Metal, without copies of the pool.

MLX does not see that a kernel changes its input. So each kernel on a layer's pages takes an output of the
previous kernel as an input, which keeps the order of launches. A step needs one launch per layer to write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..formats import page_format
from ..interface import AttendOptions, LayerSpec, PoolSpec
from ..metadata import AttentionMetadata
from ..page_bytes import PageBytes, check_write, layer_bytes
from .attention import StoredPages
from .launch import Kernel, KernelLibrary, Launch, padded
from .pool import MetalPool
from .units import MAX_WRITE_SIMDGROUPS, MIN_ELEMENTS, KernelSource, make_unit, write_unit

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


class InPlacePool(MetalPool):
    def __init__(self, spec: PoolSpec, library: KernelLibrary) -> None:
        super().__init__(spec, library)
        self._last = [mx.array(np.zeros(MIN_ELEMENTS, bool))] * len(spec.layers)
        self._rows: dict[int, mx.array] = {}
        self._no_flags: dict[int, mx.array] = {}
        self._writers: dict[tuple[int, int], Kernel] = {}

    def begin_step(self, metadata: AttentionMetadata) -> None:
        super().begin_step(metadata)
        self._rows = {}

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        self._check_rows(layer, keys, values)
        tokens, heads, _ = keys.shape
        shown = max(tokens, MIN_ELEMENTS)
        flagged = self._unstorable
        if flagged is None:
            flagged = self._no_flags.setdefault(shown, mx.array(np.zeros(shown, bool)))
        inputs = self._pages(layer).inputs() | {
            "keys": keys,
            "values": values,
            "targets": self._target_rows(heads),
            "flagged": flagged,
        }
        threads = 32 * min(2 * heads, MAX_WRITE_SIMDGROUPS)
        launch = Launch(
            grid=(shown * threads, 1, 1), threadgroup=(threads, 1, 1), outputs=(((shown,), mx.bool_),)
        )
        (written,) = self._writer(keys.shape[2], values.shape[2])(inputs, launch)
        self._last[layer] = self._unstorable = written
        self._dtypes[layer] = (keys.dtype, values.dtype)

    def pending(self) -> list[mx.array]:
        return [] if self._unstorable is None else [self._unstorable]

    def flags(self) -> list[mx.array]:
        if self._unstorable is None:
            return []
        tokens = self._step.num_tokens
        return [self._unstorable if tokens >= MIN_ELEMENTS else self._unstorable[:tokens]]

    def gather_sequences(self, layer: int) -> tuple[mx.array, mx.array]:
        mx.eval(self._last[layer])
        dense = super().gather_sequences(layer)
        mx.eval(dense)  # must happen before the next write
        return dense

    def read_pages(self, pages: Sequence[int]) -> PageBytes:
        self._finish()
        return super().read_pages(pages)

    def write_pages(self, pages: Sequence[int], data: PageBytes) -> None:
        check_write(self._spec, pages, data)
        self._finish()
        at = np.array(pages, np.int64)
        for parts, place in zip(self._parts, layer_bytes(self._spec), strict=True):
            heads = data[:, place.span].reshape(len(pages), place.layer.num_kv_heads, -1)
            start = 0
            for array in (array for part in parts for array in part):
                memory = _memory(array).reshape(self._spec.num_pages, place.layer.num_kv_heads, -1)
                width = memory.shape[-1] * memory.itemsize
                memory[at] = np.ascontiguousarray(heads[..., start : start + width]).view(memory.dtype)
                start += width

    def _finish(self) -> None:
        mx.eval(self._last)

    def _was_read(self, layer: int, read: mx.array | None) -> None:
        assert read is not None, "a kernel read pages without a place in their order"
        self._last[layer] = read

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        for layer in range(len(self._spec.layers)):
            parts = super()._pages(layer).inputs()
            self._last[layer] = copy_pages(self._library, self._spec, layer, parts, self._last[layer], pairs)

    def _pages(self, layer: int) -> StoredPages:
        keys, values = self._parts[layer]
        return StoredPages(tuple(keys), tuple(values), self._last[layer])

    def _writer(self, key_dim: int, value_dim: int) -> Kernel:
        if (key_dim, value_dim) not in self._writers:
            unit = write_unit(*self._formats, key_dim, value_dim)
            self._writers[key_dim, value_dim] = self._library.kernel(unit)
        return self._writers[key_dim, value_dim]

    def _target_rows(self, heads: int) -> mx.array:
        if heads not in self._rows:
            page, offset = np.divmod(
                self._step.groups[0].slots[:, None].astype(np.int64), self._spec.page_size
            )
            rows = (page * heads + np.arange(heads)) * self._spec.page_size + offset
            self._rows[heads] = padded(rows.astype(np.uint32).ravel())
        return self._rows[heads]


def _memory(array: mx.array) -> NDArray[Any]:
    plain = array.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[array.dtype.size])
    mx.eval(plain)
    memory = np.array(plain, copy=False)
    assert memory.flags.writeable
    return memory


_PAGE_SIZE = 16
_LAYER = LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64)
_STEPS = 6


def copies_pages(library: KernelLibrary) -> bool:
    """Return whether this device correctly copies a page that it has just written."""
    pool = _pool(library)
    rows = mx.random.normal((_PAGE_SIZE, 2, 64), key=mx.random.key(0))
    pool.begin_step(_step(0, _PAGE_SIZE, page=0))
    pool.write(0, rows, -rows)
    pool.copy_pages([(0, 2), (2, 3)])
    pages = [pool.gather_sequences(0)]
    pool.begin_step(_step(0, _PAGE_SIZE, page=3))
    pages.append(pool.gather_sequences(0))
    (keys, values), (copied_keys, copied_values) = pages
    same = mx.array_equal(keys, copied_keys) & mx.array_equal(values, copied_values)
    return bool(same & (keys != 0).any())


def overlaps_steps(library: KernelLibrary) -> bool:
    """Return whether several steps in flight give the same bits as steps one by one."""
    outs = []
    for waits in (True, False):
        pool, made = _pool(library), []
        for step in range(_STEPS):
            rows = mx.random.normal((1, 2, 64), key=mx.random.key(step))
            pool.begin_step(_step(step % 2, step % 2 + 1, page=0))
            pool.write(0, rows, -rows)
            made.append(pool.attend(0, mx.ones((1, 2, 64)), AttendOptions(scale=0.125)))
            mx.async_eval(made[-1], *pool.pending())
            if waits:
                mx.eval(made[-1])
        outs.append(mx.concatenate(made))
    alone, together = outs
    return bool(mx.array_equal(alone, together) & (alone != 0).any())


def _pool(library: KernelLibrary) -> InPlacePool:
    spec = PoolSpec(layers=(_LAYER,), num_pages=4, page_size=_PAGE_SIZE, k_format="fp4", v_format="bf16")
    return InPlacePool(spec, library)


def _step(start: int, stop: int, *, page: int) -> AttentionMetadata:
    return AttentionMetadata.of([(start, stop)], np.array([[page]], np.int32), page_size=_PAGE_SIZE)
