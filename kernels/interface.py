"""Interface between the engine and an attention backend.

A backend stores K and V in pages and attends over them. A new page format, kernel or device is added below
this interface, without changes above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from .formats import page_format
from .metadata import AttentionMetadata
from .replay import ReplayablePool

if TYPE_CHECKING:  # for type checkers only, because the control plane reads these specs without MLX
    import mlx.core as mx

    from .recurrent_kernels import RareRecurrence, RecurrentKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Shape of one attention layer's cache, and the positions visible to its queries.

    window   a query at position p sees positions > p - window (None: all up to p)
    keep     the first ``keep`` positions always stay visible (attention sinks)
    chunked  the window does not slide: a query sees the positions of its own chunk of ``window`` positions,
             up to p (kv_cache.py)
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    keep: int = 0
    chunked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """A pool: ``num_pages`` pages in each of ``layers``, K and V each in its own format."""

    layers: tuple[LayerSpec, ...]
    num_pages: int
    page_size: int
    k_format: str
    v_format: str

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, K and V of every layer; a pool holds ``num_pages`` times this."""
        k_format, v_format = page_format(self.k_format), page_format(self.v_format)
        return sum(
            fmt.page_bytes(dim, page_size=self.page_size, num_kv_heads=layer.num_kv_heads)
            for layer in self.layers
            for fmt, dim in ((k_format, layer.head_dim), (v_format, layer.value_dim))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendOptions:
    """Options of attention.

    scale     factor on dot products with a query
    sinks     [Hq]  an extra logit per query head in the softmax's denominator
    softcap   c: a logit x becomes ``c * tanh(x / c)`` before anything is added
    mask      [T, L] or [T, Hq, L], L = max kv_len, replaces causality and window. Bool: positions that a row
              sees. Float: added to its logits; -1e30 and below hides a position. Positions past a sequence's
              end are never seen, and a row that sees nothing gets zeros

    rotary    [T, Hq, Dv]  scaled rotary queries of a latent layer. Its K rows, of one head, are also V, and
              the stored V are rotary keys. Their dot products with these queries are added to the scaled
              logits; the result is [T, Hq, D]. Not with softcap
    """

    scale: float
    sinks: mx.array | None = None
    softcap: float | None = None
    mask: mx.array | None = None
    rotary: mx.array | None = None


class PageStorage(Protocol):
    """The pages of one pool, allocated once; a page id names one page in each layer of ``spec``. Call its
    methods only between steps."""

    @property
    def spec(self) -> PoolSpec: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, exactly as the memory planner predicts them."""
        ...

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy page ``source`` onto page ``target`` in every layer (copy-on-write), pair by pair."""
        ...

    def read_pages(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        """Return the bytes [len(pages), spec.page_bytes] of whole pages in the layout of ``page_bytes``, as a
        copy that is equal on every backend."""
        ...

    def write_pages(self, pages: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Write bytes in the form of ``read_pages`` into these pages. Raises ValueError, with no change,
        unless there are exactly the bytes of as many different pages."""
        ...


class PagedKVCache(Protocol):
    """K/V of every layer of a model, in one pool of pages for each group of layers.

    A step calls, in this order: ``begin_step``; per layer ``write`` and ``attend``; one ``mx.eval`` of the
    step's results together with ``pending()``; ``nonfinite_tokens``. There is at most one write per layer and
    step, and no old handle may be kept after it.
    """

    @property
    def storages(self) -> tuple[PageStorage, ...]:
        """The pools, in the order of a step's ``groups``."""
        ...

    @property
    def replayable(self) -> tuple[ReplayablePool, ...]:
        """All pools, in any order, if steps can be captured as programs; otherwise empty."""
        ...

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Check the indices (ValueError) and prepare data that all layers of the step share."""
        ...

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Store keys [T, Hkv, D] and values [T, Hkv, Dv] in the step's slots, in page format."""
        ...

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        """Return causal attention of queries [T, Hq, D] over the pages of their own sequences.

        Row t sees positions <= positions[t], inside the layer's window; query head h reads K/V head ``h //
        (Hq // Hkv)``. Returns [T, Hq, Dv] in the dtype of ``queries``. Raises ValueError for wrong shapes and
        for options that the backend has no kernel for; the reference supports all.
        """
        ...

    def gather(self, layer: int) -> tuple[mx.array, mx.array]:
        """Return dense K [T, Hkv, L, D] and V [T, Hkv, L, Dv], L = max kv_len, for models that need arrays.

        Each row has its own sequence's values, dequantized, and zeros after the sequence's end. This is slow.
        """
        ...

    def pending(self) -> list[mx.array]:
        """Return the arrays that the step must evaluate to complete its writes."""
        ...

    def flags(self) -> list[mx.array]:
        """Return unevaluated arrays [T] for ``nonfinite_tokens``, not 0 for a bad row. They outlive the step,
        so that the next step can begin before they are read."""
        ...

    def nonfinite_tokens(self) -> list[int]:
        """Return the rows t of the evaluated step with NaN or infinity in K or V of some layer. Such rows are
        stored as zeros; the engine fails their requests."""
        ...


class KVPool(PageStorage, PagedKVCache, Protocol):
    """The pages of one group of layers, with attention over them: a cache with a single storage."""

    def gather_sequences(self, layer: int) -> tuple[mx.array, mx.array]:
        """Return dense K [B, Hkv, L, D] and V [B, Hkv, L, Dv] of each sequence, like ``gather`` but once per
        sequence."""
        ...


MAX_TABLE_LAYERS = 4
"""Most layers of an ``AdapterTable``: a kernel of five layers could need more than Metal's 31 buffers."""


class AdapterTable(Protocol):
    """Low-rank adapters in the slots of layers that read one input. Factors ``a`` [rank, inputs] and ``b``
    [rank, outputs] add ``scale * (x @ a.T) @ b``; with a gain, y becomes gain (y - bias + sum) + bias."""

    def put(
        self, slot: int, layer: int, a: mx.array, b: mx.array, scale: float, gain: mx.array | None,
        bias: mx.array | None,
    ) -> None:  # fmt: skip
        """Put the factors of one layer into a slot from 1 on; ``gain`` and ``bias``: float32 [outputs]."""
        ...

    def clear(self, slot: int) -> None: ...

    def add(self, ys: Sequence[mx.array], x: mx.array, slots: mx.array) -> list[mx.array]:
        """Return ``ys``, the layers' outputs [T, outputs] for x [T, inputs], plus those of the adapters.
        ``slots``: int32 [T], 0 for rows without an adapter."""
        ...


class MakeAdapterTable(Protocol):
    """Creates an empty table for at most ``MAX_TABLE_LAYERS`` layers with these outputs; ``dtype``: of
    factors, bfloat16 or float32."""

    def __call__(
        self, inputs: int, outputs: Sequence[int], *, num_slots: int, dtype: mx.Dtype
    ) -> AdapterTable: ...


class AttentionBackend(Protocol):
    """Kernels of one device. ``name`` is shown to users: "reference", "cpu" or "metal"."""

    @property
    def name(self) -> str: ...

    @property
    def has_model_ops(self) -> bool:
        """Whether its native extension (``kernels._ext``) also computes linear layers, norms, rotary
        embeddings, activations and sampling."""
        ...

    @property
    def takes_masks(self) -> bool:
        """Whether its pools support ``AttendOptions.mask``."""
        ...

    @property
    def writes_in_place(self) -> bool:
        """Whether pages are written without new arrays, so that MLX does not copy a pool that a submitted
        step uses."""
        ...

    @property
    def recurrent_kernels(self) -> RecurrentKernels | None:
        """Kernels of recurrent layers; None if MLX's operations compute them."""
        ...

    @property
    def rare_recurrence(self) -> RareRecurrence | None:
        """Kernels of recurrences that few models have; None if there are only ``recurrent_kernels``."""
        ...

    @property
    def adapter_tables(self) -> MakeAdapterTable | None:
        """Maker of tables of adapters. None if MLX's operations add adapters, or with ``has_model_ops`` the
        native extension."""
        ...

    @property
    def compiles_at_launch(self) -> bool:
        """Whether a kernel is compiled at its first launch, so that the first request would wait."""
        ...

    def create_pool(self, spec: PoolSpec) -> KVPool:
        """Allocate a pool. Raises ValueError for a pool that the backend cannot hold."""
        ...

    def create_residual_pool(self, spec: PoolSpec, residual: PoolSpec) -> PagedKVCache:
        """Allocate a pool of quantized pages with the 16-bit pages of its residual window (residual.py).
        Raises ValueError for a pool that the backend cannot hold."""
        ...


def refuse_option(backend: str, **given: object) -> None:
    """Raise ValueError if one of these options is not None, because the backend has no kernel for it."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"the {backend} backend has no attention kernel with {name}; use --backend reference"
            )
