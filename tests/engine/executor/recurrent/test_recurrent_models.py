from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

import recurrent_models
from native import require_extension
from octavo.engine.executor.adapt.install import adapt_models
from octavo.engine.executor.batch import NO_ROWS, Batch, slice_rows
from octavo.engine.executor.load.discover import discover_layout
from octavo.engine.executor.paged_model import PagedModel
from octavo.engine.executor.recurrent.cut_points import install_cut_points
from octavo.engine.executor.recurrent.recurrences import Recurrences, recurrences_of
from octavo.engine.executor.recurrent.recurrent_layers import RecurrentLayers
from octavo.engine.executor.recurrent.state_pool import StatePool
from octavo.kernels.interface import PoolSpec
from octavo.kernels.kv_cache import GroupedKVCache
from octavo.kernels.metadata import AttentionMetadata, GroupMetadata, StateMetadata
from octavo.kernels.reference.backend import ReferenceBackend

pytestmark = pytest.mark.parity

PAGE_SIZE = 8
NUM_PAGES = 5  # pages of each sequence
LENGTH = 24
QUICK = ("qwen3_next", "lfm2", "falcon_h1", "recurrent_gemma", "rwkv7", "mamba2")
"""A gated delta net, a short convolution, two caches in a layer, token shifts and a model without
attention."""

ARCHITECTURES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in recurrent_models.CONFIGS
]

LIMITS = {"longcat_flash_ngram": 1e-3, "bailing_hybrid": 1e-4, "plamo2": 1e-4}
"""Larger, because rounding of K to 16 bits may go either way."""

Rows = dict[int, NDArray[np.float32]]
Work = tuple[int, int]  # (sequence, number of its next tokens)


class Run:
    def __init__(
        self, model: Module, name: str, tokens: dict[int, list[int]], recurrences: Recurrences | None = None
    ) -> None:
        layout = discover_layout(model, name)
        self.layers = RecurrentLayers(layout.mixers, recurrences)
        self.states = StatePool(8)
        self.tokens = tokens
        self.at: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        self.logits: dict[int, Rows] = {}
        spec = PoolSpec(
            layers=layout.layers,
            num_pages=1 + 5 * NUM_PAGES,
            page_size=PAGE_SIZE,
            k_format="fp16",
            v_format="fp16",
        )
        pool = ReferenceBackend().create_pool(spec) if layout.layers else GroupedKVCache((), ())
        self.model = PagedModel(model, layout, pool, recurrent=self.layers, states=self.states)

    def open(self, sequence: int, slot: int, *, like: int | None = None, at: int = 0) -> None:
        self.slots[sequence], self.at[sequence], self.logits[sequence] = slot, at, {}
        if like is not None:
            pairs = list(zip(self.pages(like), self.pages(sequence), strict=True))
            for storage in self.model.kv_cache.storages:
                storage.copy_pages(pairs)

    def pages(self, sequence: int) -> list[int]:
        return [1 + page * 5 + sequence for page in range(NUM_PAGES)]

    def metadata(self, work: list[Work], snapshots: list[tuple[int, int, int]]) -> AttentionMetadata:
        ranges = [range(self.at[s], self.at[s] + count) for s, count in work]
        tables = [self.pages(s) for s, _ in work]
        slots = [
            pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE
            for positions, pages in zip(ranges, tables, strict=True)
            for p in positions
        ]
        starts = itertools.accumulate((count for _, count in work), initial=0)
        return AttentionMetadata(
            positions=np.array([p for positions in ranges for p in positions], np.int32),
            q_start=np.array(list(starts), np.int32),
            kv_len=np.array([positions.stop for positions in ranges], np.int32),
            groups=(GroupMetadata(slots=np.array(slots, np.int32), page_table=np.array(tables, np.int32)),),
            page_size=PAGE_SIZE,
            states=StateMetadata(
                slots=np.array([self.slots[s] for s, _ in work], np.int32),
                snapshots=np.array(snapshots, np.int32).reshape(-1, 3),
            ),
        )

    def step(
        self, *work: Work, snapshots: list[tuple[int, int, int]] | None = None, slices: int | None = None
    ) -> None:
        metadata = self.metadata(list(work), snapshots or [])
        tokens = np.array(
            [token for s, count in work for token in self.tokens[s][self.at[s] : self.at[s] + count]],
            np.int32,
        )
        parts = []
        for first in range(0, len(tokens), slices or len(tokens)):
            stop = min(first + (slices or len(tokens)), len(tokens))
            part = slice_rows(metadata, first, stop)
            (logits,) = self.model.forward(Batch(tokens[first:stop], NO_ROWS, part)).arrays
            self.model.evaluate([logits])
            parts.append(np.array(logits.astype(mx.float32)))
        rows = iter(np.concatenate(parts))
        for sequence, count in work:
            for _ in range(count):
                self.logits[sequence][self.at[sequence]] = next(rows)
                self.at[sequence] += 1


def schedule(run: Run, *, swap: bool = False) -> None:
    for sequence in range(3):
        run.open(sequence, sequence)
    run.step((0, 5))
    run.step((0, 1), (1, 7))
    run.step((0, 3), (1, 3), (2, 3), snapshots=[(1, 8, 6)])
    run.step((1, 1), (0, 4), (2, 4), slices=3)
    run.step((2, 1), (1, 1), (0, 1))
    run.open(3, 3, like=0, at=14)
    run.open(4, 4, like=1, at=8)
    run.states.copy_pages([(0, 3), (6, 4)])
    run.step((0, 1), (3, 1), (1, 1), (4, 9), (2, 1))
    run.step((0, 1), (3, 2), (1, 1), (4, 1), (2, 2))
    if swap:
        mine, other = run.states.read_pages((0, 4)), run.states.read_pages((4, 0))
        other[:, -8:] = mine[:, -8:]
        run.states.write_pages((0, 4), other)
    run.step((0, 1), (1, 1), (4, 1), (3, 1), (2, 1))


def sequences() -> dict[int, list[int]]:
    rng = np.random.default_rng(5)
    a, b, c, d, e = (rng.integers(0, 320, LENGTH).tolist() for _ in range(5))
    return {0: a, 1: b, 2: c, 3: a[:14] + d[14:], 4: b[:8] + e[8:]}


def plain_logits(model: Module, tokens: list[int]) -> NDArray[np.float32]:
    """Return logits [L, V] computed with mlx-lm's caches, with K and V rounded to 16 bits."""
    caches = make_prompt_cache(model)
    for cache in (part for some in caches for part in getattr(some, "caches", (some,))):
        if hasattr(cache, "keys"):
            cache.update_and_fetch = rounded(cache.update_and_fetch)
    logits: mx.array = model(mx.array([tokens]), cache=caches)
    return np.array(logits[0].astype(mx.float32))


def rounded(store: object) -> object:
    def update_and_fetch(keys: mx.array, values: mx.array) -> object:
        half = (x.astype(mx.float16).astype(x.dtype) for x in (keys, values))
        return store(*half)  # type: ignore[operator]

    return update_and_fetch


def largest_error(got: dict[int, Rows], wanted: dict[int, NDArray[np.float32]]) -> float:
    return max(
        float(np.abs(row - wanted[s][i]).max() / np.abs(wanted[s]).max())
        for s, rows in got.items()
        for i, row in rows.items()
    )


@contextmanager
def released(run: Run) -> Iterator[Run]:
    try:
        yield run
    finally:
        run.layers.release()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.few(3)
def test_mixed_steps_give_the_logits_of_mlx_lm(name: str) -> None:
    model, tokens = recurrent_models.build(name), sequences()
    adapt_models()
    install_cut_points()
    wanted = {s: plain_logits(model, some) for s, some in tokens.items()}
    with released(Run(model, name, tokens)) as run:
        schedule(run)
        assert all(run.logits.values())
        assert largest_error(run.logits, wanted) < LIMITS.get(name, 1e-5)
    with released(Run(model, name, tokens)) as run:
        schedule(run, swap=True)
        last = {s: {run.at[s] - 1: rows[run.at[s] - 1]} for s, rows in run.logits.items()}
        assert largest_error(last, wanted) > 1e-3, "exchanged states are not noticed"
    again = plain_logits(model, tokens[0])
    assert np.array_equal(again, wanted[0]), "plain mlx-lm is not itself afterwards"


def test_a_step_computed_twice_is_refused() -> None:
    model, tokens = recurrent_models.build("lfm2"), sequences()
    adapt_models()
    install_cut_points()
    with released(Run(model, "lfm2", tokens)) as run:
        run.open(0, 0)
        run.step((0, 5))
        run.step((0, 1))
        run.at[0] = 5
        with pytest.raises(
            ValueError, match="holds the state after 6 tokens, but its sequence continues after 5"
        ):
            run.step((0, 1))


def test_a_step_that_was_not_evaluated_leaves_the_states_alone() -> None:
    model, tokens = recurrent_models.build("lfm2"), sequences()
    adapt_models()
    install_cut_points()
    wanted = plain_logits(model, tokens[0])
    with released(Run(model, "lfm2", tokens)) as run:
        run.open(0, 0)
        run.step((0, 5))
        for _ in range(2):
            metadata = run.metadata([(0, 2)], [])
            run.model.forward(Batch(np.array(tokens[0][5:7], np.int32), NO_ROWS, metadata))
        run.step((0, 2))
        assert largest_error(run.logits, {0: wanted}) < 1e-5


KERNELS = {
    "qwen3_5": 6, "kimi_linear": 12, "olmo_hybrid": 12, "falcon_h1": 8, "lfm2": 2, "mamba2": 6, "rwkv7": 9,
    "bailing_hybrid": 2, "bailing_moe_linear": 2, "mamba": 6, "falcon_mamba": 6, "jamba": 4,
    "recurrent_gemma": 6, "baichuan_m1": 8,
}  # fmt: skip
"""Number of states that native kernels keep, by architecture."""


def native_recurrences() -> Recurrences | None:
    require_extension()
    from octavo.kernels.cpu.backend import CpuBackend

    return recurrences_of(CpuBackend())


ROUNDED_KEYS = 1e-4
"""Largest error where K is rounded to 16 bits, which may go either way."""


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("qwen3_5", "mamba2", "rwkv7", "mamba", "recurrent_gemma", "baichuan_m1")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in KERNELS
    ],
)
@pytest.mark.few(3)
def test_native_kernels_give_the_logits_of_mlx_lm(name: str) -> None:
    model, tokens = recurrent_models.build(name), sequences()
    adapt_models()
    install_cut_points()
    wanted = {s: plain_logits(model, some) for s, some in tokens.items()}
    recurrences = native_recurrences()
    with released(Run(model, name, tokens, recurrences)) as run:
        schedule(run)
        assert sum(run.states.computed_by.values()) == KERNELS[name]
        limit = ROUNDED_KEYS if run.model.kv_cache.storages else 1e-5
        assert largest_error(run.logits, wanted) < limit
    with released(Run(model, name, tokens, recurrences)) as run:
        schedule(run, swap=True)
        last = {s: {run.at[s] - 1: rows[run.at[s] - 1]} for s, rows in run.logits.items()}
        assert largest_error(last, wanted) > 1e-3, "exchanged states are not noticed"


@pytest.mark.parametrize("name", ["mamba", pytest.param("recurrent_gemma", marks=pytest.mark.slow)])
def test_native_kernels_keep_every_state_in_bf16(name: str) -> None:
    """Mamba-1 multiplies by a float32 matrix A, so its activations become float32 in the first layer."""
    model, tokens = recurrent_models.build(name, mx.bfloat16), sequences()
    adapt_models()
    install_cut_points()
    wanted = {s: plain_logits(model, some) for s, some in tokens.items()}
    with released(Run(model, name, tokens, native_recurrences())) as run:
        schedule(run)
        assert sum(run.states.computed_by.values()) == KERNELS[name]
        assert largest_error(run.logits, wanted) < 2e-2
