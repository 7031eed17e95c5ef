"""The reference backend: paged attention on MLX operations, on any device.

It gathers and dequantizes the pages of every sequence for each layer and step, so it is slow. NumPy
computes quantized pages. Codes and
scales of K and of V are separate arrays for each layer, [num_pages * Hkv * page_size, width]. Code outside
this module must not keep a handle to a pool array, or MLX copies it at each write.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..interface import AttendOptions, LayerSpec, PagedKVCache, PageStorage, PoolSpec
from ..masks import check_mask
from ..metadata import AttentionMetadata
from ..page_bytes import PageBytes, check_read, check_write, layer_bytes
from ..replay import ReplayablePool
from .attention import Bias, EqualRows, attend_group, group_sequences
from .codecs import Codec, hadamard
from .residual import ReferenceResidualCache


class ReferencePool:
    def __init__(self, spec: PoolSpec) -> None:
        self._spec = spec
        self._codecs = (Codec(spec.k_format), Codec(spec.v_format))
        self._parts = [self._allocate(layer) for layer in spec.layers]
        self._dtypes = [(mx.float32, mx.float32)] * len(spec.layers)
        self._metadata: AttentionMetadata | None = None
        self._groups: list[EqualRows] = []
        self._slot_rows: dict[int, mx.array] = {}
        self._restore_order = mx.array([0])
        self._unstorable: mx.array | None = None
        mx.eval(self._parts)

    @property
    def spec(self) -> PoolSpec:
        return self._spec

    @property
    def storages(self) -> tuple[PageStorage, ...]:
        return (self,)

    @property
    def replayable(self) -> tuple[ReplayablePool, ...]:
        return ()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for layer in self._parts for part in layer for array in part)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        if metadata.page_size != self._spec.page_size:
            raise ValueError(f"page_size must be the pool's {self._spec.page_size}, got {metadata.page_size}")
        metadata.check(self._spec.num_pages)
        self._metadata = metadata
        self._slot_rows = {}
        self._unstorable = None
        self._plan(metadata)

    def _plan(self, metadata: AttentionMetadata) -> None:
        self._groups, order = group_sequences(metadata)
        self._restore_order = mx.array(order)

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        self._check_rows(layer, keys, values)
        num_kv_heads, unstorable = self._spec.layers[layer].num_kv_heads, self._unstorable
        for part, rows in enumerate((keys, values)):
            encoder = self._codecs[part]
            wide = rows.astype(mx.float32)
            encoded = encoder.encode(hadamard(wide) if encoder.format.rotates else wide)
            targets = self._targets(num_kv_heads)
            for stored, new in zip(self._parts[layer][part], encoded.parts, strict=True):
                stored[targets] = new
            bad = mx.logical_not(encoded.storable.all(axis=-1))
            unstorable = bad if unstorable is None else mx.logical_or(unstorable, bad)
        self._unstorable = unstorable
        self._dtypes[layer] = (keys.dtype, values.dtype)

    def _check_rows(self, layer: int, keys: mx.array, values: mx.array) -> None:
        spec, tokens = self._spec.layers[layer], self._step.num_tokens
        for name, rows, dim in (("keys", keys, spec.head_dim), ("values", values, spec.value_dim)):
            if rows.shape != (tokens, spec.num_kv_heads, dim):
                raise ValueError(f"{name} must be {(tokens, spec.num_kv_heads, dim)}, got {rows.shape}")

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        spec = self._spec.layers[layer]
        bias = self.check_queries(layer, queries, options)
        if options.rotary is not None:
            return self._attend_latents(layer, queries, options, options.rotary, bias)
        wide = queries.astype(mx.float32) * options.scale
        if self._codecs[0].format.rotates:
            wide = hadamard(wide)
        outs = [
            attend_group(
                group,
                wide[group.rows],
                [(None, self._read(layer, 0, group.tables), self._read(layer, 1, group.tables))],
                spec=spec,
                options=options,
                bias=bias,
            )
            for group in self._groups
        ]
        out = mx.concatenate(outs)[self._restore_order]
        if self._codecs[1].format.rotates:
            out = hadamard(out)
        return out.astype(queries.dtype)

    def _attend_latents(
        self, layer: int, queries: mx.array, options: AttendOptions, rotary: mx.array, bias: Bias
    ) -> mx.array:
        spec = self._spec.layers[layer]
        self.check_latents(layer, queries, options)
        wide = mx.concatenate(
            [queries.astype(mx.float32) * options.scale, rotary.astype(mx.float32)], axis=-1
        )
        outs = []
        for group in self._groups:
            latents = self.rows(layer, 0, group.tables)
            keys = mx.concatenate([latents, self.rows(layer, 1, group.tables)], axis=-1)
            kinds = [(None, keys, latents)]
            outs.append(attend_group(group, wide[group.rows], kinds, spec=spec, options=options, bias=bias))
        return mx.concatenate(outs)[self._restore_order].astype(queries.dtype)

    def check_latents(self, layer: int, queries: mx.array, options: AttendOptions) -> None:
        spec, rotary = self._spec.layers[layer], options.rotary
        if spec.num_kv_heads != 1 or options.softcap is not None:
            raise ValueError(f"latents have one KV head and no softcap, got {spec} and {options.softcap}")
        wanted = (*queries.shape[:2], spec.value_dim)
        if rotary is None or rotary.shape != wanted:
            raise ValueError(
                f"rotary queries must be {wanted}, got {None if rotary is None else rotary.shape}"
            )

    def check_queries(self, layer: int, queries: mx.array, options: AttendOptions) -> Bias:
        heads, dim = self._spec.layers[layer].num_kv_heads, self._spec.layers[layer].head_dim
        tokens, num_heads = self._step.num_tokens, queries.shape[1]
        if queries.shape != (tokens, num_heads, dim) or num_heads % heads:
            raise ValueError(f"queries must be ({tokens}, a multiple of {heads}, {dim}), got {queries.shape}")
        if (mask := options.mask) is None:
            return Bias()
        length = int(self._step.kv_len.max())
        return Bias(check_mask(mask, tokens=tokens, num_heads=num_heads, length=length))

    @property
    def groups(self) -> list[EqualRows]:
        return self._groups

    @property
    def restore_order(self) -> mx.array:
        return self._restore_order

    def rows(self, layer: int, part: int, tables: mx.array) -> mx.array:
        """Return K (``part`` 0) or V (1) in the pages of ``tables`` [B, P], dequantized and rotated back.

        The result is float32 [B, Hkv, P * page_size, dim].
        """
        rows = self._read(layer, part, tables)
        return hadamard(rows) if self._codecs[part].format.rotates else rows

    def gather(self, layer: int) -> tuple[mx.array, mx.array]:
        rows = mx.array(self._step.row_sequences)
        keys, values = self.gather_sequences(layer)
        return keys[rows], values[rows]

    def gather_sequences(self, layer: int) -> tuple[mx.array, mx.array]:
        metadata = self._step
        tables, lengths = mx.array(metadata.groups[0].page_table), mx.array(metadata.kv_len)
        longest = int(metadata.kv_len.max())
        dense = []
        for part in (0, 1):
            rows = self.rows(layer, part, tables)[:, :, :longest]
            live = mx.arange(longest) < lengths[:, None]
            dense.append(mx.where(live[:, None, :, None], rows, 0.0).astype(self._dtypes[layer][part]))
        return dense[0], dense[1]

    def pending(self) -> list[mx.array]:
        """Return the arrays to evaluate. Do not keep the list: MLX would copy the pool in the next step."""
        arrays = [array for layer in self._parts for part in layer for array in part]
        return arrays if self._unstorable is None else [*arrays, self._unstorable]

    def flags(self) -> list[mx.array]:
        return [] if self._unstorable is None else [self._unstorable]

    def nonfinite_tokens(self) -> list[int]:
        if self._unstorable is None:
            return []
        return np.flatnonzero(np.asarray(self._unstorable)).tolist()

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages pair by pair, because a page may be a target and later a source."""
        check_read(self._spec, [page for pair in pairs for page in pair])
        batch: list[tuple[int, int]] = []
        for source, target in pairs:
            if any(source == written or target == written for _, written in batch):
                self._copy(batch)
                batch = []
            batch.append((source, target))
        if batch:
            self._copy(batch)

    def read_pages(self, pages: Sequence[int]) -> PageBytes:
        check_read(self._spec, pages)
        data = np.empty((len(pages), self._spec.page_bytes), np.uint8)
        if not pages:
            return data
        for parts, place in zip(self._parts, layer_bytes(self._spec), strict=True):
            rows = self._page_rows(pages, place.layer)
            heads = data[:, place.span].reshape(len(pages), place.layer.num_kv_heads, -1)
            start = 0
            for array in (array for part in parts for array in part):
                raw = np.array(array[rows].view(mx.uint8)).reshape(*heads.shape[:2], -1)
                heads[..., start : start + raw.shape[-1]] = raw
                start += raw.shape[-1]
            data[:, place.span] = heads.reshape(len(pages), -1)
        return data

    def write_pages(self, pages: Sequence[int], data: PageBytes) -> None:
        check_write(self._spec, pages, data)
        for parts, place in zip(self._parts, layer_bytes(self._spec), strict=True):
            rows = self._page_rows(pages, place.layer)
            heads = data[:, place.span].reshape(len(pages), place.layer.num_kv_heads, -1)
            start = 0
            for array in (array for part in parts for array in part):
                width = array.shape[-1] * array.dtype.size
                stop = start + width * self._spec.page_size
                raw = np.ascontiguousarray(heads[..., start:stop]).reshape(-1, width)
                array[rows] = mx.array(raw).view(array.dtype)
                start = stop
        mx.eval(self._parts)

    def _page_rows(self, pages: Sequence[int], layer: LayerSpec) -> mx.array:
        size = layer.num_kv_heads * self._spec.page_size
        return mx.array((np.array(pages, np.int64)[:, None] * size + np.arange(size)).ravel())

    @property
    def _step(self) -> AttentionMetadata:
        if self._metadata is None:
            raise ValueError("no step has begun; call begin_step first")
        return self._metadata

    def _allocate(self, layer: LayerSpec) -> tuple[list[mx.array], list[mx.array]]:
        rows = self._spec.num_pages * layer.num_kv_heads * self._spec.page_size
        keys, values = (
            [mx.zeros((rows, width), dtype) for width, dtype in encoder.layout(dim)]
            for encoder, dim in zip(self._codecs, (layer.head_dim, layer.value_dim), strict=True)
        )
        return keys, values

    def _targets(self, num_kv_heads: int) -> mx.array:
        if num_kv_heads not in self._slot_rows:
            self._slot_rows[num_kv_heads] = mx.array(self._slot_targets(num_kv_heads))
        return self._slot_rows[num_kv_heads]

    def _slot_targets(self, num_kv_heads: int) -> NDArray[np.int64]:
        size = self._spec.page_size
        page, offset = np.divmod(self._step.groups[0].slots[:, None].astype(np.int64), size)
        return (page * num_kv_heads + np.arange(num_kv_heads)) * size + offset

    def _read(self, layer: int, part: int, tables: mx.array) -> mx.array:
        num_kv_heads, page_size = self._spec.layers[layer].num_kv_heads, self._spec.page_size
        heads = tables[:, None, :].astype(mx.int64) * num_kv_heads + mx.arange(num_kv_heads)[:, None]
        rows = (heads[..., None] * page_size + mx.arange(page_size)).reshape(len(tables), num_kv_heads, -1)
        parts = tuple(stored[rows] for stored in self._parts[layer][part])
        return self._codecs[part].decode(parts)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        for layer, spec in zip(self._parts, self._spec.layers, strict=True):
            size = spec.num_kv_heads * self._spec.page_size
            rows = np.array(pairs, np.int64)[:, :, None] * size + np.arange(size)
            sources, targets = mx.array(rows[:, 0].ravel()), mx.array(rows[:, 1].ravel())
            for array in (array for part in layer for array in part):
                copied = array[sources]
                mx.eval(copied)  # the scatter below reuses the buffer only after this read
                array[targets] = copied
        mx.eval(self._parts)


class ReferenceBackend:
    name = "reference"
    has_model_ops = False
    takes_masks = True
    writes_in_place = False
    recurrent_kernels = None
    adapter_tables = None
    compiles_at_launch = False

    def create_pool(self, spec: PoolSpec) -> ReferencePool:
        return ReferencePool(spec)

    def create_residual_pool(self, spec: PoolSpec, residual: PoolSpec) -> PagedKVCache:
        return ReferenceResidualCache(ReferencePool(spec), ReferencePool(residual))
