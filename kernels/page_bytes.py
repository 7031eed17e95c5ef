"""Layout of a page as bytes, equal on every backend, so that pages can move between pools.

A page holds layers in order, and a layer its KV heads. A head has codes of K rows, their scales, codes of
V rows, and their scales. Numbers are little-endian. Formats with a rotation store rotated rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .formats import page_format
from .interface import LayerSpec, PoolSpec

PageBytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerBytes:
    layer: LayerSpec
    span: slice
    head_bytes: int


def layer_bytes(spec: PoolSpec) -> list[LayerBytes]:
    places, start = [], 0
    for layer in spec.layers:
        size = replace(spec, layers=(layer,)).page_bytes
        places.append(LayerBytes(layer, slice(start, start + size), size // layer.num_kv_heads))
        start += size
    return places


def check_read(spec: PoolSpec, pages: Sequence[int]) -> None:
    for page in pages:
        if not 0 <= page < spec.num_pages:
            raise ValueError(f"page {page} lies outside the pool of {spec.num_pages} pages")


def check_write(spec: PoolSpec, pages: Sequence[int], data: PageBytes) -> None:
    """Raise ValueError unless all pages are different and ``data`` has as many bytes as they take."""
    check_read(spec, pages)
    if len(set(pages)) != len(pages):
        raise ValueError(f"pages {list(pages)} must be different, because each is written once")
    if data.dtype != np.uint8 or data.shape != (len(pages), spec.page_bytes):
        raise ValueError(
            f"{len(pages)} pages take uint8 bytes {(len(pages), spec.page_bytes)}, "
            f"got {data.dtype} {data.shape}"
        )


def convert_pages(source: PoolSpec, data: PageBytes, target: PoolSpec, *, skip: int = 0) -> PageBytes:
    """Convert consecutive pages of one sequence to another page size or format.

    ``data`` is [n, source.page_bytes], the result [m, target.page_bytes]. The first ``skip`` positions are
    left out, and so are last positions that do not fill a page of the new size. Rows of an unchanged format
    keep their bits. Raises ValueError for pools with different layers, and for values that the new format
    cannot store.
    """
    if source.layers != target.layers:
        raise ValueError("pages can be converted between pools of the same layers only")
    positions = max(len(data) * source.page_size - skip, 0) // target.page_size * target.page_size
    out = np.empty((positions // target.page_size, target.page_bytes), np.uint8)
    if not positions:
        return out
    for old, new in zip(layer_bytes(source), layer_bytes(target), strict=True):
        heads = new.layer.num_kv_heads
        rows = data[:, old.span].reshape(len(data), heads, old.head_bytes)
        halves = [
            _to_pages(_convert(part, names), skip, positions, target.page_size)
            for part, names in zip(
                _split(source, old.layer, rows),
                ((source.k_format, target.k_format), (source.v_format, target.v_format)),
                strict=True,
            )
        ]
        out[:, new.span] = np.concatenate(halves, axis=-1).reshape(len(out), -1)
    return out


def _split(spec: PoolSpec, layer: LayerSpec, heads: PageBytes) -> Iterator[tuple[PageBytes, PageBytes]]:
    start, num_heads = 0, layer.num_kv_heads
    for name, dim in ((spec.k_format, layer.head_dim), (spec.v_format, layer.value_dim)):
        fmt = page_format(name)
        parts = []
        for width in (
            fmt.codes_per_row(dim) * np.dtype(fmt.code_dtype).itemsize,
            fmt.scales_per_row(dim) * np.dtype(fmt.scale_dtype).itemsize,
        ):
            stop = start + width * spec.page_size
            rows = heads[..., start:stop].reshape(len(heads), num_heads, spec.page_size, width)
            parts.append(rows.swapaxes(0, 1).reshape(num_heads, len(heads) * spec.page_size, width))
            start = stop
        yield parts[0], parts[1]


def _convert(rows: tuple[PageBytes, PageBytes], names: tuple[str, str]) -> tuple[PageBytes, PageBytes]:
    if names[0] == names[1]:
        return rows
    old, new = page_format(names[0]), page_format(names[1])
    codes, scales = (np.ascontiguousarray(part) for part in rows)
    values = old.restore(codes.view(old.code_dtype), scales.view(old.scale_dtype))
    new_codes, new_scales, storable = new.store(values)
    if not storable.all():
        raise ValueError(f"{old.name} pages hold values that {new.name} cannot store; use bf16 pages")
    return _raw(new_codes), _raw(new_scales)


def _raw(part: NDArray[np.generic]) -> PageBytes:
    width = part.shape[-1] * part.dtype.itemsize
    return np.ascontiguousarray(part).view(np.uint8).reshape(*part.shape[:-1], width)


def _to_pages(rows: tuple[PageBytes, PageBytes], skip: int, positions: int, page_size: int) -> PageBytes:
    num_heads, num_pages = len(rows[0]), positions // page_size
    sizes = (part.shape[-1] * page_size for part in rows)
    return np.concatenate(
        [
            part[:, skip : skip + positions].reshape(num_heads, num_pages, size).swapaxes(0, 1)
            for part, size in zip(rows, sizes, strict=True)
        ],
        axis=-1,
    )
