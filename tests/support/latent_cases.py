"""MLA cases: latents and rotary keys in pages, and their attention in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from octavo.kernels.interface import (
    AttendOptions,
    AttentionBackend,
    KVPool,
    LayerSpec,
    PagedKVCache,
    PoolSpec,
)
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata
from octavo.kernels.residual_cache import ResidualCache

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """``sequences``: (positions before the last step, rows of the last step)."""

    sequences: tuple[tuple[int, int], ...]
    page_size: int = 16
    num_heads: int = 4
    latent: int = 64
    rotary: int = 16
    window: int | None = None

    @property
    def layer(self) -> LayerSpec:
        return LayerSpec(num_kv_heads=1, head_dim=self.latent, value_dim=self.rotary, window=self.window)


CASES = {
    "decode": Case(((0, 1), (15, 1), (16, 1), (70, 1))),
    "mixed": Case(((0, 5), (33, 1), (20, 18))),
    "small pages": Case(((0, 5), (9, 1), (13, 6)), page_size=4),
    "long": Case(((2100, 1), (1500, 3))),
    "many heads": Case(((40, 1), (0, 9)), num_heads=48, latent=512, rotary=64),
    "odd dims": Case(((40, 1), (0, 9)), num_heads=6, latent=40, rotary=8, page_size=8),
    "uneven tiles": Case(((40, 1), (17, 9), (90, 1)), num_heads=20, latent=96, rotary=32),
    "window": Case(((40, 1), (0, 30)), window=12),
    "window of pages": Case(((90, 1), (17, 40), (75, 1)), num_heads=20, page_size=8, window=29),
}

MLA = Case(((40, 1), (0, 2)), num_heads=20, latent=512, rotary=64)
"""Row sizes of DeepSeek's pages, with the 20 heads of glm4_moe_lite."""


def metadata(case: Case, work: list[tuple[int, int, int]], *, kinds: int = 1) -> AttentionMetadata:
    size = case.page_size
    width = max(-(-(old + new) // size) for old, new in case.sequences)
    count = len(case.sequences)
    tables = np.arange(1, count * width + 1, dtype=np.int32)[::-1].reshape(count, width)
    positions = np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in work])
    owners = np.concatenate([np.full(b - a, i) for i, a, b in work])
    slots = (tables[owners, positions // size] * size + positions % size).astype(np.int32)
    chosen = np.ascontiguousarray(tables[[i for i, _, _ in work]])
    return AttentionMetadata(
        positions=positions,
        q_start=np.cumsum([0, *(b - a for _, a, b in work)]).astype(np.int32),
        kv_len=np.array([b for *_, b in work], np.int32),
        groups=(GroupMetadata(slots=slots, page_table=chosen),) * kinds,
        page_size=size,
    )


class Data:
    """Random latents, rotary keys and queries for every position."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(7)
        self.case = case
        lengths = [old + new for old, new in case.sequences]

        def normal(*shape: int) -> list[Floats]:
            return [rng.standard_normal((length, *shape)).astype(np.float32) for length in lengths]

        self.latents, self.rotary = normal(1, case.latent), normal(1, case.rotary)
        self.queries, self.rotary_queries = (
            normal(case.num_heads, case.latent),
            normal(case.num_heads, case.rotary),
        )
        self.scale = (case.latent + case.rotary) ** -0.5

    def rows(self, parts: list[Floats], work: list[tuple[int, int, int]], dtype: mx.Dtype) -> mx.array:
        return mx.array(np.concatenate([parts[i][a:b] for i, a, b in work])).astype(dtype)

    def write(
        self, pool: PagedKVCache, work: list[tuple[int, int, int]], dtype: mx.Dtype = mx.bfloat16
    ) -> None:
        if work:
            self._begin(pool, work, dtype)
            mx.eval(pool.pending())

    def _begin(self, pool: PagedKVCache, work: list[tuple[int, int, int]], dtype: mx.Dtype) -> None:
        pool.begin_step(metadata(self.case, work, kinds=len(pool.storages)))
        pool.write(0, self.rows(self.latents, work, dtype), self.rows(self.rotary, work, dtype))

    def step(
        self,
        pool: PagedKVCache,
        work: list[tuple[int, int, int]],
        dtype: mx.Dtype = mx.bfloat16,
        mask: mx.array | None = None,
    ) -> Floats:
        """Write and attend; returns rows [T, Hq, R]."""
        self._begin(pool, work, dtype)
        rotary = self.rows(self.rotary_queries, work, mx.float32) * self.scale
        options = AttendOptions(scale=self.scale, rotary=rotary.astype(dtype), mask=mask)
        out = pool.attend(0, self.rows(self.queries, work, dtype), options)
        mx.eval(out, *pool.pending())
        return np.array(out.astype(mx.float32))

    def truth(self, pool: KVPool, work: list[tuple[int, int, int]]) -> NDArray[np.float64]:
        """Return float64 attention over the stored rows of a computed step."""
        latents, keys = (np.array(x.astype(mx.float32), np.float64) for x in pool.gather_sequences(0))
        out = []
        for b, (i, start, stop) in enumerate(work):
            for p in range(start, stop):
                first = 0 if self.case.window is None else max(0, p + 1 - self.case.window)
                seen = slice(first, p + 1)
                logits = (
                    self.queries[i][p] @ latents[b, 0, seen].T
                    + self.rotary_queries[i][p] @ keys[b, 0, seen].T
                )
                weights = np.exp((logits - logits.max(-1, keepdims=True)) * self.scale)
                out.append(weights @ latents[b, 0, seen] / weights.sum(-1, keepdims=True))
        return np.array(out)


def spec_of(case: Case, k_format: str = "bf16", v_format: str = "bf16") -> PoolSpec:
    width = max(-(-(old + new) // case.page_size) for old, new in case.sequences)
    return PoolSpec(
        layers=(case.layer,),
        num_pages=1 + width * len(case.sequences),
        page_size=case.page_size,
        k_format=k_format,
        v_format=v_format,
    )


def relative_errors(got: Floats, wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.sqrt(((got - wanted) ** 2).mean(-1) / (wanted**2).mean(-1)))


def history(case: Case) -> list[tuple[int, int, int]]:
    return [(i, 0, old) for i, (old, _) in enumerate(case.sequences) if old]


def last_step(case: Case) -> list[tuple[int, int, int]]:
    return [(i, old, old + new) for i, (old, new) in enumerate(case.sequences)]


def residual_truth(
    data: Data, pool: ResidualCache[KVPool], work: list[tuple[int, int, int]]
) -> NDArray[np.float64]:
    kinds = [
        [np.array(x.astype(mx.float32), np.float64) for x in part.gather_sequences(0)]
        for part in (pool.quantized, pool.residual)
    ]
    starts, keep = pool.starts(), pool.residual.spec.layers[0].keep
    window = data.case.window
    out: list[NDArray[np.float64]] = []
    for b, (i, start, stop) in enumerate(work):
        for p in range(start, stop):
            seen = np.arange(0 if window is None else max(0, p + 1 - window), p + 1)
            whole = ((seen >= starts[len(out)]) | (seen < keep))[:, None]
            latents, keys = (
                np.where(whole, kinds[1][x][b, 0, seen], kinds[0][x][b, 0, seen]) for x in (0, 1)
            )
            logits = data.queries[i][p] @ latents.T + data.rotary_queries[i][p] @ keys.T
            weights = np.exp((logits - logits.max(-1, keepdims=True)) * data.scale)
            out.append(weights @ latents / weights.sum(-1, keepdims=True))
    return np.array(out)


def residual_pool(
    backend: AttentionBackend, case: Case, *formats: str, window: int, keep: int
) -> PagedKVCache:
    """Return a pool of quantized pages, with 16-bit pages for the last ``window`` positions of a query."""
    spec = spec_of(case, *formats)
    if case.window is not None:
        window, keep = min(window, case.window), 0
    layers = (replace(case.layer, window=window, keep=keep),)
    residual = replace(spec, layers=layers, k_format="bf16", v_format="bf16")
    return backend.create_residual_pool(spec, residual)
