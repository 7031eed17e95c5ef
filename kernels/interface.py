"""Narrow waist 2: what the engine may ask of an attention backend, and nothing more.

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

if TYPE_CHECKING:  # the control plane reads the specs below without importing MLX
    import mlx.core as mx


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Shape of one attention layer's cache, and what its queries can see.

    window   a query at position p sees positions > p - window (None: all up to p)
    keep     the first ``keep`` positions stay visible whatever the window (sinks)
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    keep: int = 0


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


class KVPool(Protocol):
    """The pages of every layer, allocated once; the page ids are shared by all layers.

    Per step, in this order: ``begin_step``, then per layer ``write`` and ``attend``, then
    one ``mx.eval`` of the step's results together with ``pending()``, then
    ``nonfinite_tokens``. At most one write per layer and step; no old handle survives it.
    """

    @property
    def spec(self) -> PoolSpec: ...

    @property
    def nbytes(self) -> int:
        """Bytes held by the pool, exactly what the memory planner predicts."""
        ...

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Check the indices (ValueError) and prepare what every layer of the step shares."""
        ...

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Store keys [T, Hkv, D] and values [T, Hkv, Dv] in the step's slots, in page format."""
        ...

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
        """Causal attention of queries [T, Hq, D] over the pages of their own sequences.

        Row t sees positions <= positions[t], inside the layer's window; query head h reads
        K/V head ``h // (Hq // Hkv)``. ``sinks`` [Hq] adds one logit per head to the softmax's
        denominator; ``softcap`` c replaces a logit x by ``c * tanh(x / c)`` before anything is added;
        ``alibi_slopes`` [Hq] m adds ``m * (j - p)`` to the logit of position j for a query at p.

        ``mask`` [T, L] or [T, Hq, L], L = max kv_len, takes the place of causality and window: bool,
        which positions a row sees; float, what is added to its logits, -1e30 and below where it sees nothing.
        Nothing past a sequence's end is seen, and a row that sees nothing gets zeros.

        Returns [T, Hq, Dv] in the dtype of ``queries``. ValueError for shapes that do not fit, and
        for what a backend has no kernel for: the reference backend has all of it.
        """
        ...

    def gather(self, layer: int) -> tuple[mx.array, mx.array]:
        """Dense K [B, Hkv, L, D] and V [B, Hkv, L, Dv], L = max kv_len, dequantized and
        zero past a sequence's end: the slow path for models that need real arrays."""
        ...

    def pending(self) -> list[mx.array]:
        """Arrays the step must evaluate so that its writes have happened."""
        ...

    def nonfinite_tokens(self) -> list[int]:
        """Rows t of the evaluated step whose K or V held NaN or infinity in some layer.
        Such rows are stored as zeros; the engine fails their requests."""
        ...

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy page ``source`` onto page ``target`` in every layer (copy-on-write), before
        the next ``begin_step``."""
        ...

    def read_pages(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        """Bytes [len(pages), spec.page_bytes] of whole pages, laid out as in ``page_bytes``: a
        copy, equal on every backend. Between steps only."""
        ...

    def write_pages(self, pages: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Put bytes as from ``read_pages`` into these pages, before the next ``begin_step``;
        ValueError, and no change, unless they are the bytes of that many different pages."""
        ...


class AttentionBackend(Protocol):
    """One device's kernels. ``name`` is "reference", "cpu" or "metal"."""

    @property
    def name(self) -> str: ...

    def create_pool(self, spec: PoolSpec) -> KVPool:
        """Allocate a pool; ValueError names what the backend cannot hold."""
        ...

    def create_mixed_pool(self, spec: PoolSpec, twins: PoolSpec) -> KVPool:
        """Allocate a pool and the 16-bit twins of some of its pages (mixed.py); ValueError likewise."""
        ...


def refuse_bias(backend: str, **given: object) -> None:
    """ValueError if one of these arguments of ``KVPool.attend`` is not None: the backend has no kernel
    for it, and says so rather than leave it out."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"the {backend} backend has no attention kernel with {name}; the reference backend has"
            )
