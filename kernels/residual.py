"""Mixed residency: quantized pages, and 16-bit twins of those that queries still read at full precision.

Every row is stored twice, quantized in its page and as 16 bits in the page's twin: both formats
store rows one by one, so a quantized page never has to be made out of another. Once no later query
reads a twin, the block manager gives it back, and the quantized page, which is there, is all that is left::

    page         0     1     2     3     4     5          a query in page 5, keep = 1 page, window = 1
    twins       16b    -     -     -     -    16b         what it reads of the twins ...
    quantized    .     q     q     q     q     .          ... and of the quantized pages

What a query reads depends on its position alone, never on the step it is computed in: so K/V of a
position stay a function of the tokens up to it, and pages can be shared, published and computed again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from .interface import KVPool, LayerSpec, PoolSpec
from .metadata import AttentionMetadata, Ints

if TYPE_CHECKING:
    import mlx.core as mx
    from numpy.typing import NDArray

SIXTEEN_BITS = ("bf16", "fp16")

Pool = TypeVar("Pool", bound=KVPool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """What stays in 16 bits of a sequence whose pages are quantized.

    keep_pages       its first pages (attention sinks)
    recent_pages     its last pages, the one being written included
    quantize_after   queries before this position read 16 bits alone; a request may have its own number
    """

    keep_pages: int = 0
    recent_pages: int = 1
    quantize_after: int = 0

    def window(self, page_size: int) -> int:
        """Positions up to a query's own that it reads in 16 bits, at least."""
        return (self.recent_pages - 1) * page_size + 1


def check_twins(spec: PoolSpec, twins: PoolSpec) -> None:
    """ValueError unless ``twins`` describes 16-bit twins of pages of ``spec``: its layers are the same
    but for their window and ``keep``, which say what is read of the twins."""
    for name in (twins.k_format, twins.v_format):
        if name not in SIXTEEN_BITS:
            raise ValueError(f"twins must be of a 16-bit format ({', '.join(SIXTEEN_BITS)}), got {name}")
    if twins.page_size != spec.page_size or len(twins.layers) != len(spec.layers):
        raise ValueError("twins must have the layers and the page size of the pages they are twins of")
    for layer, twin in zip(spec.layers, twins.layers, strict=True):
        if _shape(layer) != _shape(twin):
            raise ValueError(
                f"twins of rows {_shape(layer)} (heads, K, V) must have them too, got {_shape(twin)}"
            )
        if twin.window is None or (layer.window is not None and (twin.window > layer.window)):
            raise ValueError(f"twins need a window, at most the layer's {layer.window}, got {twin.window}")
        if layer.window is not None and twin.keep != layer.keep:
            raise ValueError(f"twins of a layer with a window must keep its {layer.keep}, got {twin.keep}")


def _shape(layer: LayerSpec) -> tuple[int, int, int]:
    return layer.num_kv_heads, layer.head_dim, layer.value_dim


def twin_starts(positions: Ints, quantize_after: Ints, *, window: int | Ints, page_size: int) -> Ints:
    """Where the twins begin that queries at ``positions`` read, beside kept ones; shapes are broadcast."""
    first = np.maximum(positions - (window - 1), 0) // page_size * page_size
    return np.where(positions < quantize_after, 0, first).astype(np.int32)


class MixedPool(ABC, Generic[Pool]):
    """``KVPool`` over a pool of quantized pages and one of twins. A step's metadata has two groups: where
    its rows lie in the first, and where in the second. What speaks of pages is asked of either."""

    def __init__(self, quantized: Pool, twins: Pool) -> None:
        check_twins(quantized.spec, twins.spec)
        self.quantized = quantized
        self.twins = twins

    @property
    def spec(self) -> PoolSpec:
        raise ValueError("pages of a mixed pool have no one size; ask its quantized pages or its twins")

    @property
    def nbytes(self) -> int:
        return self.quantized.nbytes + self.twins.nbytes

    def begin_step(self, metadata: AttentionMetadata) -> None:
        quantized, twins = metadata.groups
        if quantized.page_table.shape != twins.page_table.shape:
            raise ValueError("the tables of a step's pages and of their twins must have one shape")
        self.quantized.begin_step(quantized)
        self.twins.begin_step(twins)

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        self.quantized.write(layer, keys, values)
        self.twins.write(layer, keys, values)

    @abstractmethod
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
    ) -> mx.array: ...

    def gather(self, layer: int) -> tuple[mx.array, mx.array]:
        raise ValueError(
            f"K/V of layer {layer} cannot be gathered: each query reads other pages in 16 bits; models that "
            "need them gathered need pages of one kind"
        )

    def pending(self) -> list[mx.array]:
        return [*self.quantized.pending(), *self.twins.pending()]

    def nonfinite_tokens(self) -> list[int]:
        return sorted({*self.quantized.nonfinite_tokens(), *self.twins.nonfinite_tokens()})

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        raise ValueError(f"pages {list(pairs)} are of one kind; copy them in its pool")

    def read_pages(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        raise ValueError(f"pages {list(pages)} are of one kind; read them from its pool")

    def write_pages(self, pages: Sequence[int], data: NDArray[np.uint8]) -> None:
        del data
        raise ValueError(f"pages {list(pages)} are of one kind; write them to its pool")
