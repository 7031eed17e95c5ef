from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .formats import page_format
from .metadata import AttentionMetadata
from .replay import ReplayablePool

if TYPE_CHECKING:  # for type checkers only, because the control plane reads these specs without MLX
    import mlx.core as mx

    from .recurrent_kernels import RecurrentKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Shape of one attention layer's cache, and the positions visible to its queries.

    window   a query at position p sees positions > p - window (None: all up to p)
    keep     the first ``keep`` positions are visible to every query (attention sinks)
    chunked  whether ``window`` is the size of fixed chunks; a query sees only its own chunk, up to p
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    keep: int = 0
    chunked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Shape of a pool: each of ``layers`` has ``num_pages`` pages."""

    layers: tuple[LayerSpec, ...]
    num_pages: int
    page_size: int
    k_format: str
    v_format: str

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V of one page in all layers."""
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
    sinks     [Hq]  one more logit per query head in the denominator of the softmax
    softcap   a logit x becomes ``softcap * tanh(x / softcap)``, before ``mask`` and ``sinks``
    mask      [T, L] or [T, Hq, L], L = max kv_len, replaces causality and window. Bool: visible positions.
              Float: added to logits; values of -1e30 and below hide a position
    rotary    [T, Hq, Dv]  scaled rotary queries of a latent layer (MLA), which has one KV head. Its K pages
              hold latents, both keys and values; its V pages hold rotary keys. The result is [T, Hq, D].
              Not allowed with softcap
    """

    scale: float
    sinks: mx.array | None = None
    softcap: float | None = None
    mask: mx.array | None = None
    rotary: mx.array | None = None


class PageStorage(Protocol):
    """Pages of one pool, allocated once. Call the methods only between steps.

    A page id stands for one page in each layer of ``spec``.
    """

    @property
    def spec(self) -> PoolSpec: ...

    @property
    def nbytes(self) -> int: ...

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy page ``source`` onto page ``target`` in every layer, pair by pair."""
        ...

    def read_pages(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        """Return a copy of whole pages as bytes [len(pages), spec.page_bytes].

        The layout is equal on every backend; see page_bytes.py.
        """
        ...

    def write_pages(self, pages: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Write bytes, in the layout of ``read_pages``, into these pages.

        Raises ValueError, and changes nothing, if a page occurs twice or ``data`` has a wrong shape.
        """
        ...


class PagedKVCache(Protocol):
    """K/V of every layer of a model, in one pool of pages for each group of layers.

    A step calls ``begin_step``, then ``write`` and ``attend`` for each layer, then one ``mx.eval`` with
    ``pending()``, and at last ``nonfinite_tokens``. A step may write each layer once. After a write, callers
    must not keep older array handles of that layer.
    """

    @property
    def storages(self) -> tuple[PageStorage, ...]:
        """The pools, in the order of ``AttentionMetadata.groups``."""
        ...

    @property
    def replayable(self) -> tuple[ReplayablePool, ...]:
        """All pools, in any order, if steps can be captured as programs; otherwise empty."""
        ...

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Prepare data that all layers of the step share. Raises ValueError for indices out of range."""
        ...

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Convert keys [T, Hkv, D] and values [T, Hkv, Dv] to the page format; store them in their slots."""
        ...

    def attend(self, layer: int, queries: mx.array, options: AttendOptions) -> mx.array:
        """Return causal attention of queries [T, Hq, D] over the pages of their own sequences.

        Row t sees positions up to ``positions[t]``, inside the layer's window. Query head h reads K/V head
        ``h // (Hq // Hkv)``. Returns [T, Hq, Dv] in the dtype of ``queries``. Raises ValueError for wrong
        shapes and unsupported options.
        """
        ...

    def gather(self, layer: int) -> tuple[mx.array, mx.array]:
        """Return dense K [T, Hkv, L, D] and V [T, Hkv, L, Dv], L = max kv_len, for models that need arrays.

        Row t has the dequantized K and V of its sequence, and zeros after the sequence's end. This is slow.
        """
        ...

    def pending(self) -> list[mx.array]:
        """Return the arrays that the step must evaluate to complete its writes."""
        ...

    def flags(self) -> list[mx.array]:
        """Return the unevaluated arrays [T] that ``nonfinite_tokens`` reads; nonzero marks a bad row.

        The arrays stay valid after the step.
        """
        ...

    def nonfinite_tokens(self) -> list[int]:
        """Return the rows of the evaluated step that have NaN or infinity in K or V of some layer.

        Such rows were stored as zeros; the engine fails their requests.
        """
        ...


class KVPool(PageStorage, PagedKVCache, Protocol):
    def gather_sequences(self, layer: int) -> tuple[mx.array, mx.array]:
        """Return dense K [B, Hkv, L, D] and V [B, Hkv, L, Dv] of each sequence."""
        ...


MAX_TABLE_LAYERS = 4
"""Most layers of an adapter table: a kernel of five layers could need more than Metal's 31 buffers."""


class AttentionBackend(Protocol):
    """Kernels of one device, named "reference", "cpu" or "metal"."""

    @property
    def name(self) -> str: ...

    @property
    def has_model_ops(self) -> bool:
        """Whether the backend has native linear layers, norms, activations and sampling."""
        ...

    @property
    def takes_masks(self) -> bool: ...

    @property
    def writes_in_place(self) -> bool:
        """Whether kernels write pages into the pool's own arrays."""
        ...

    @property
    def recurrent_kernels(self) -> RecurrentKernels | None:
        """Kernels of recurrent layers; None if MLX's operations compute them."""
        ...

    @property
    def adapter_tables(self) -> Callable[..., Any] | None:
        """``MetalAdapterTable``; None if other operations compute adapters."""
        ...

    @property
    def compiles_at_launch(self) -> bool:
        """Whether a kernel is compiled at its first launch, which delays the first request."""
        ...

    def create_pool(self, spec: PoolSpec) -> KVPool:
        """Allocate a pool. Raises ValueError for a pool that the backend cannot hold."""
        ...

    def create_residual_pool(self, spec: PoolSpec, residual: PoolSpec) -> PagedKVCache:
        """Allocate a pool of quantized pages, ``spec``, and a residual window, ``residual``.

        Raises ValueError for a pool that the backend cannot hold.
        """
        ...


def refuse_mask(backend: str, mask: object) -> None:
    """Raise ValueError if a mask is given."""
    if mask is not None:
        raise ValueError(f"the {backend} backend has no attention kernel with mask; use --backend reference")
