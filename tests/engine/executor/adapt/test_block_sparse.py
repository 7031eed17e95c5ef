from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

import tiny_models
from attention_backends import BACKENDS, TestedBackend
from octavo.engine.executor import overrides
from octavo.engine.executor.adapt import block_sparse
from octavo.engine.executor.batch import NO_ROWS, Batch
from octavo.engine.executor.cache_layout import CacheLayout
from octavo.engine.executor.load.discover import discover_layout, map_leaves
from octavo.engine.executor.load.loader import load_model
from octavo.engine.executor.load.probe_steps import num_pages, probe_cache, step_metadata
from octavo.engine.executor.paged_model import PagedModel

pytestmark = pytest.mark.parity

Floats = NDArray[np.float32]
LENGTH = 107
CHUNKS = ((0, 40), (40, 41), (41, 100), (100, 101), (101, LENGTH))
NAMES = ["phi3small", "minimax_m3_vl"]


def load(folder: Path, name: str) -> tuple[Module, CacheLayout]:
    loaded = load_model(tiny_models.make_model(folder, name, dtype=mx.float32), weights="keep")
    return loaded.model, discover_layout(loaded.model, name)


def rounded(cache: Any) -> Any:
    store = cache.update_and_fetch
    cache.update_and_fetch = lambda *rows: store(*(x.astype(mx.float16).astype(x.dtype) for x in rows))
    return cache


def plain_logits(model: Any, tokens: list[int], chunk: int) -> Floats:
    caches = map_leaves(make_prompt_cache(model), rounded)
    rows = [
        model(mx.array([tokens[first : first + chunk]]), cache=caches)[0]
        for first in range(0, len(tokens), chunk)
    ]
    return np.array(mx.concatenate(rows))


@functools.cache
def logits_one_by_one(name: str, tokens: tuple[int, ...]) -> Floats:
    with tempfile.TemporaryDirectory() as folder:
        return plain_logits(load(Path(folder), name)[0], list(tokens), 1)


def paged_logits(
    model: Module, layout: CacheLayout, backend: TestedBackend, sequences: list[list[int]]
) -> Floats:
    count = len(sequences)
    pool = probe_cache(backend.create(), layout, 1 + count * num_pages(LENGTH))
    paged = PagedModel(model, layout, pool)
    out = []
    for start, stop in CHUNKS:
        work = [(i, max(0, start - 2), stop - 2) for i in range(count - 1)] + [(count - 1, start, stop)]
        ids = np.concatenate([np.array(sequences[i][a:b], np.int32) for i, a, b in work])
        metadata = step_metadata(work, num_sequences=count, longest=LENGTH)
        (logits,) = paged.forward(Batch(ids, NO_ROWS, metadata)).arrays
        paged.evaluate([logits])
        out.append(np.array(logits.astype(mx.float32))[start - stop :])
    return np.concatenate(out)


def worst_error(got: Floats, wanted: Floats) -> float:
    seen = np.isfinite(wanted)
    got, wanted = np.where(seen, got, 0), np.where(seen, wanted, 0)
    return float((np.abs(got - wanted).max(-1) / np.abs(wanted).max(-1)).max())


@pytest.mark.parametrize(("name", "backend"), list(zip(NAMES, BACKENDS, strict=True)))
@pytest.mark.few(1)
def test_blocks_are_seen_as_by_mlx_lm_one_token_at_a_time(
    tmp_path: Path, name: str, backend: TestedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, layout = load(tmp_path, name)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, tiny_models.VOCAB_SIZE, LENGTH).tolist() for _ in range(2)]
    wanted = logits_one_by_one(name, tuple(sequences[-1]))
    got = paged_logits(model, layout, backend, sequences)
    assert worst_error(got, wanted) < backend.tolerance + 0.01
    alone = paged_logits(model, layout, backend, sequences[-1:])
    np.testing.assert_allclose(alone, got, rtol=0, atol=1e-5 if backend.name == "reference" else 0)

    def everything(positions: mx.array, length: int, num_heads: int) -> mx.array:
        seen = mx.arange(length) <= positions[:, None]
        return mx.repeat(seen[:, None], num_heads, axis=1)

    monkeypatch.setattr(
        block_sparse, "strided_blocks", lambda at, length, num_heads, **_: everything(at, length, num_heads)
    )
    monkeypatch.setattr(
        block_sparse, "best_blocks", lambda scores, at, **_: everything(at, scores.shape[-1], scores.shape[1])
    )
    assert worst_error(paged_logits(model, layout, backend, sequences), wanted) > 0.05, "blocks matter here"


def test_the_mask_of_a_prompt_is_mended_in_phi3small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm 0.32 lets rows of a prompt see later rows."""
    model, _ = load(tmp_path, "phi3small")
    tokens = list(range(30))
    assert worst_error(plain_logits(model, tokens, 30), plain_logits(model, tokens, 1)) < 1e-4
    kind: Any = type(model.model.layers[0].self_attn)
    plain = overrides.original(block_sparse.PHI3SMALL, "Attention._block_sparse_attention")
    monkeypatch.setattr(kind, "_block_sparse_attention", plain)
    assert worst_error(plain_logits(model, tokens, 30), plain_logits(model, tokens, 1)) > 0.01


def test_strided_blocks_are_the_latest_and_some_of_those_before() -> None:
    positions = np.array([0, 3, 4, 17, 30, 31])
    got = np.array(
        block_sparse.strided_blocks(
            mx.array(positions), 32, num_heads=4, block_size=4, local_blocks=2, stride=3
        )
    )
    for row, p in enumerate(positions):
        for head in range(4):
            for t in range(32):
                near = p // 4 - t // 4 < 2
                strided = (t // 4 + head + 1) % 3 == 0
                assert got[row, head, t] == (t <= p and (near or strided)), (p, head, t)


@pytest.mark.parametrize("levels", [3, 1000], ids=["equal scores", "different scores"])
@pytest.mark.parametrize("length", [30, 32])
def test_the_best_blocks_are_the_latest_and_then_those_of_the_best_positions(
    levels: int, length: int
) -> None:
    rng = np.random.default_rng(0)
    positions = np.arange(length)
    scores = rng.integers(0, levels, (length, 2, length)).astype(np.float32)
    chosen = np.array(
        block_sparse.best_blocks(mx.array(scores), mx.array(positions), block_size=4, count=3, local_blocks=1)
    )
    for p in positions:
        for head in range(2):
            best = [scores[p, head, first : min(first + 4, p + 1)].max() for first in range(0, p + 1, 4)]
            best[-1] = np.inf
            blocks = np.argsort(-np.array(best), kind="stable")[:3]
            wanted = [t for t in range(p + 1) if t // 4 in blocks]
            assert np.flatnonzero(chosen[p, head]).tolist() == wanted, (p, head)
