"""Interface between the engine and an attention backend.

The engine decides; a backend stores K/V in pages and attends over them. A new page
format, kernel or device lives below this line and touches nothing above it.
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

if TYPE_CHECKING:  # the control plane reads the specs below without importing MLX
    import mlx.core as mx

    from .recurrent_kernels import RareRecurrentKernels, RecurrentKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Shape of one attention layer's cache, and what its queries can see.

    window   a query at position p sees positions > p - window (None: all up to p)
    keep     the first ``keep`` positions stay visible whatever the window (sinks)
    chunked  the window does not slide: a query sees the positions of its own chunk of ``window`` positions,
             up to p (chunked.py)
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
    """Options of attention: how it weighs what it sees.

    scale     multiplies a query's dot products
    sinks     [Hq]  one more logit per query head in the softmax's denominator
    softcap   c replaces a logit x by ``c * tanh(x / c)`` before anything is added
    mask      [T, L] or [T, Hq, L], L = max kv_len, in place of causality and window: bool, which
              positions a row sees; float, what is added to its logits, -1e30 and below where it
              sees nothing. Nothing past a sequence's end is seen, and a row that sees nothing gets zeros

    rotary    [T, Hq, Dv]  the layer is a latent one: its K rows, of one head, are V as well, and what is
              stored as V are rotary keys. Their dot products with these queries, which come scaled,
              join the scaled logits; the result is [T, Hq, D]. No softcap with it
    """

    scale: float
    sinks: mx.array | None = None
    softcap: float | None = None
    mask: mx.array | None = None
    rotary: mx.array | None = None


class PageStorage(Protocol):
    """The pages of one pool, allocated once: a page id means one page in each layer of ``spec``.

    Everything here happens between steps.
    """

    @property
    def spec(self) -> PoolSpec: ...

    @property
    def nbytes(self) -> int:
        """Bytes held by the pool, exactly what the memory planner predicts."""
        ...

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy page ``source`` onto page ``target`` in every layer (copy-on-write), pair by pair."""
        ...

    def read_pages(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        """Bytes [len(pages), spec.page_bytes] of whole pages, laid out as in ``page_bytes``: a
        copy, equal on every backend."""
        ...

    def write_pages(self, pages: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Put bytes as from ``read_pages`` into these pages; ValueError, and no change, unless they
        are the bytes of that many different pages."""
        ...


class PagedKVCache(Protocol):
    """K/V of every layer of a model, in one pool of pages for each group of layers.

    Per step, in this order: ``begin_step``, then per layer ``write`` and ``attend``, then
    one ``mx.eval`` of the step's results together with ``pending()``, then
    ``nonfinite_tokens``. At most one write per layer and step; no old handle survives it.
    """

    @property
    def storages(self) -> tuple[PageStorage, ...]:
        """The pools that page ids of a step's ``groups`` mean, in their order."""
        ...

    @property
    def replayable(self) -> tuple[ReplayablePool, ...]:
        """All pools, in any order, where steps can be captured as programs; empty where they cannot."""
        ...

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Check the indices (ValueError) and prepare what every layer of the step shares."""
        ...

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Store keys [T, Hkv, D] and values [T, Hkv, Dv] in the step's slots, in page format."""
        ...

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        """Causal attention of queries [T, Hq, D] over the pages of their own sequences.

        Row t sees positions <= positions[t], inside the layer's window; query head h reads
        K/V head ``h // (Hq // Hkv)``. Returns [T, Hq, Dv] in the dtype of ``queries``. ValueError for
        shapes that do not fit, and for options a backend has no kernel for: the reference has all.
        """
        ...

    def gather(self, layer: int) -> tuple[mx.array, mx.array]:
        """Dense K [T, Hkv, L, D] and V [T, Hkv, L, Dv], L = max kv_len: for each row what its own
        sequence holds, dequantized, zero past the sequence's end; the slow path for models that need
        real arrays."""
        ...

    def pending(self) -> list[mx.array]:
        """Arrays the step must evaluate so that its writes have happened."""
        ...

    def flags(self) -> list[mx.array]:
        """Arrays [T] of the step, not evaluated, from which ``nonfinite_tokens`` is read: not 0 for such a
        row. They outlive the step, so that the next one can begin before they are looked at."""
        ...

    def nonfinite_tokens(self) -> list[int]:
        """Rows t of the evaluated step whose K or V held NaN or infinity in some layer.
        Such rows are stored as zeros; the engine fails their requests."""
        ...


class KVPool(PageStorage, PagedKVCache, Protocol):
    """The pages of one group of layers, and attention over them: a cache of one storage, itself."""

    def gather_sequences(self, layer: int) -> tuple[mx.array, mx.array]:
        """Dense K [B, Hkv, L, D] and V [B, Hkv, L, Dv] of each sequence: as ``gather``, once for all of a
        sequence's rows."""
        ...


class AttentionBackend(Protocol):
    """Kernels of one device. ``name`` is for people: "reference", "cpu" or "metal"."""

    @property
    def name(self) -> str: ...

    @property
    def has_model_ops(self) -> bool:
        """Whether the native extension it runs on (``kernels._ext``) also computes what a model does beside
        attention: linear layers, norms, rotary embeddings, activations, sampling."""
        ...

    @property
    def takes_masks(self) -> bool:
        """Whether its pools attend with ``AttendOptions.mask``."""
        ...

    @property
    def writes_in_place(self) -> bool:
        """Whether pages are written without new arrays: a step in flight does not make MLX copy its pool."""
        ...

    @property
    def recurrent_kernels(self) -> RecurrentKernels | None:
        """Kernels of recurrent layers; None: MLX's operations compute them."""
        ...

    @property
    def rare_recurrent_kernels(self) -> RareRecurrentKernels | None:
        """Kernels of recurrences that few models have; None where ``recurrent_kernels`` are all there is."""
        ...

    @property
    def compiles_at_launch(self) -> bool:
        """Whether a kernel is compiled when it is first launched, so that the first request would wait."""
        ...

    def create_pool(self, spec: PoolSpec) -> KVPool:
        """Allocate a pool; ValueError names what the backend cannot hold."""
        ...

    def create_residual_pool(self, spec: PoolSpec, residual: PoolSpec) -> PagedKVCache:
        """Allocate a pool of quantized pages and the 16-bit pages of its residual window
        (residual.py); ValueError likewise."""
        ...


def refuse_option(backend: str, **given: object) -> None:
    """ValueError if one of these of a call's ``AttendOptions`` is not None: the backend has no kernel
    for it, and says so rather than leave it out."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"the {backend} backend has no attention kernel with {name}; the reference backend has"
            )
