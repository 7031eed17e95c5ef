from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, QuantizedKVCache

import tiny_models
from attention_backends import BACKENDS, TestedBackend
from octavo.engine.api.errors import ModelLoadError
from octavo.engine.executor.adapt import cache_adapter as hook
from octavo.engine.executor.adapt import sparse_latents
from octavo.engine.executor.adapt.output_head import select_rows
from octavo.engine.executor.cache_layout import CacheLayout
from octavo.engine.executor.load import probe, probe_reference
from octavo.engine.executor.load.discover import discover_layout
from octavo.engine.executor.load.loader import load_model, materialize
from octavo.engine.executor.load.prepare import model_ops
from octavo.engine.executor.load.probe_run import ComputedRows
from octavo.kernels.interface import AttentionBackend, LayerSpec, PoolSpec
from octavo.kernels.kv_cache import cut_into_chunks
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.reference.backend import ReferenceBackend, ReferencePool

pytestmark = pytest.mark.parity

Change = Callable[[pytest.MonkeyPatch], AttentionBackend]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    chosen: TestedBackend = request.param
    return chosen.create()


def load(folder: Path, name: str, **config: Any) -> tuple[Module, CacheLayout]:
    dtype = config.pop("dtype", mx.bfloat16)
    loaded = load_model(tiny_models.make_model(folder, name, dtype=dtype, **config), weights="keep")
    return loaded.model, discover_layout(loaded.model, name)


def run_probe(folder: Path, name: str, backend: AttentionBackend, **config: Any) -> probe.ProbeResult:
    model, layout = load(folder, name, **config)
    selection = select_rows(model, vocab_size=layout.vocab_size)
    materialize(model, model_ops(backend), exact=False, fuse=True)
    return probe.probe(model, layout, backend, selection, architecture=name)


@pytest.mark.parametrize("name", sorted(set(tiny_models.CONFIGS) - {"qwen3_moe", "gpt_oss"}))
@pytest.mark.few(7)
def test_common_architectures_are_paged(tmp_path: Path, backend: AttentionBackend, name: str) -> None:
    result = run_probe(tmp_path, name, backend)
    assert result.selects_rows


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_mixtures_are_paged(tmp_path: Path, backend: AttentionBackend, name: str) -> None:
    result = run_probe(tmp_path, name, backend, dtype=mx.float32)
    assert result.selects_rows


def test_decode_rows_and_chunk_rows_are_distinguished() -> None:
    steps = [(3, 1), (1, 0), (2, 1)]
    wanted = [
        np.random.default_rng(i).standard_normal((n, 8)).astype(np.float32) for i, n in enumerate((6, 2))
    ]
    got = [rows.copy() for rows in wanted]
    got[0][3] *= -1
    got[1] *= -1
    reference = probe_reference.Reference([[], []], wanted, np.zeros(8), 0.0, 0.0, 8)
    decodes, chunks = probe._compare(ComputedRows(got, []), reference, steps)
    assert decodes.shape == (3,)
    assert decodes.min() > 1
    assert chunks.shape == (5,)
    assert chunks.max() == 0


@pytest.mark.parametrize("unlucky", [True, False])
def test_more_roundings_are_tried_if_one_explains_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unlucky: bool
) -> None:
    made: list[probe_reference.Reference] = []

    def first_of_all(*args: Any) -> probe_reference.Reference:
        reference = probe_reference.make_reference(*args)
        return dataclasses.replace(reference, worst=-1.0) if unlucky else reference

    def further(*args: Any) -> probe_reference.Reference:
        made.append(probe_reference.with_more_noise(*args))
        return made[-1]

    monkeypatch.setattr(probe, "make_reference", first_of_all)
    monkeypatch.setattr(probe, "with_more_noise", further)
    run_probe(tmp_path, "llama", ReferenceBackend())
    assert [reference.worst > 0 for reference in made] == [True] * unlucky


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_mixtures_in_bf16_are_paged_on_the_native_backend(tmp_path: Path, name: str) -> None:
    native = next((chosen for chosen in BACKENDS if chosen.name == "cpu"), None)
    assert native is not None
    result = run_probe(tmp_path, name, native.create())
    assert result.selects_rows


@pytest.mark.parametrize("config", [{}, {"q_lora_rank": None}], ids=["low-rank", "whole"])
def test_latent_attention_is_paged(tmp_path: Path, backend: AttentionBackend, config: dict[str, Any]) -> None:
    result = run_probe(tmp_path, "deepseek_v3", backend, dtype=mx.float32, **config)
    assert result.latents


def test_chunked_attention_is_paged_and_wider_attention_refused(
    tmp_path: Path, backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"dtype": mx.float32}
    run_probe(tmp_path / "right", "llama4", backend, **settings)
    twice = "octavo.kernels.kv_cache.cut_into_chunks"
    monkeypatch.setattr(twice, lambda step, chunk: cut_into_chunks(step, 2 * chunk))
    with pytest.raises(ModelLoadError, match=r"paged cache \(logits of"):
        run_probe(tmp_path / "wrong", "llama4", backend, **settings)


choose = sparse_latents.best_positions


WRONG_CHOICES: tuple[Any, ...] = (
    lambda scores, positions, count: choose(-scores, positions, count),
    lambda scores, positions, count: choose(scores, positions + 1, count),
    lambda scores, positions, count: choose(scores, positions, count - 1),
)


def test_chosen_positions_are_paged_and_others_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"dtype": mx.float32}
    right = run_probe(tmp_path / "right", "deepseek_v32", ReferenceBackend(), **settings)
    assert (right.latents, right.gathers) == (True, True)
    for number, wrong in enumerate(WRONG_CHOICES):
        monkeypatch.setattr(sparse_latents, "best_positions", wrong)
        with pytest.raises(ModelLoadError, match="different results with a paged cache"):
            run_probe(tmp_path / str(number), "deepseek_v32", ReferenceBackend(), **settings)


def test_choices_that_only_long_texts_need_are_known_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"dtype": mx.float32, "index_topk": 2048}
    assert run_probe(tmp_path / "masks", "deepseek_v32", ReferenceBackend(), **settings).gathers
    monkeypatch.setattr(ReferenceBackend, "takes_masks", False)
    with pytest.raises(
        ModelLoadError, match=r"'deepseek_v32' .* select positions .* reference backend has no"
    ):
        run_probe(tmp_path / "no masks", "deepseek_v32", ReferenceBackend(), **settings)


def test_index_keys_are_stored_once(tmp_path: Path) -> None:
    _, layout = load(tmp_path, "deepseek_v32")
    latents = LayerSpec(num_kv_heads=1, head_dim=16, value_dim=8)
    assert layout.layers == (latents, LayerSpec(num_kv_heads=1, head_dim=8, value_dim=8)) * 4


@pytest.mark.usefixtures("unadapted_gear")
def test_models_that_multiply_keys_themselves_are_refused(tmp_path: Path, backend: AttentionBackend) -> None:
    with pytest.raises(
        ModelLoadError, match=r"'gear' computes different results with a paged cache .*cannot be served"
    ):
        run_probe(tmp_path, "gear", backend, dtype=mx.float32)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("plamo", {"n_shared_head": 2}),
        ("gpt_bigcode", {"n_embd": 64, "n_layer": 2, "n_inner": 128, "n_head": 4, "n_positions": 512}),
    ],
)
def test_functions_of_mlx_and_numpy_meet_handles(
    tmp_path: Path, backend: AttentionBackend, name: str, config: dict[str, Any]
) -> None:
    run_probe(tmp_path, name, backend, dtype=mx.float32, layer_norm_epsilon=1e-5, **config)


def test_a_window_of_the_masks_alone_is_a_window(tmp_path: Path, backend: AttentionBackend) -> None:
    model, _ = load(tmp_path, "ministral3")
    full: Any = KVCache
    object.__setattr__(model, "make_cache", lambda: [full() for _ in model.layers])
    layout = discover_layout(model, "ministral3")
    assert [spec.window for spec in layout.layers] == [tiny_models.WINDOW, None] * 2
    selection = select_rows(model, vocab_size=layout.vocab_size)
    probe.probe(model, layout, backend, selection, architecture="ministral3")


@pytest.mark.parametrize("num_kv_heads", [2, 4], ids=["grouped", "one query head each"])
@pytest.mark.parametrize("name", ["gemma2", "gear"])
@pytest.mark.few(3)
def test_softcapped_attention_is_paged_with_its_cap(
    tmp_path: Path, backend: AttentionBackend, name: str, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits far exceed the cap, so attention without the cap differs by more than rounding errors."""
    settings = {"num_key_value_heads": num_kv_heads, "dtype": mx.float32}
    run_probe(tmp_path / "capped", name, backend, **settings)
    attend = hook.LayerCache.attend

    def without_cap(shim: hook.LayerCache, queries: mx.array, **options: Any) -> mx.array:
        return attend(shim, queries, **options | {"softcap": None})

    monkeypatch.setattr(hook.LayerCache, "attend", without_cap)
    with pytest.raises(ModelLoadError, match="rows have error"):
        run_probe(tmp_path / "not capped", name, backend, **settings)


def test_models_whose_caches_are_neither_attention_nor_recurrent_are_refused(tmp_path: Path) -> None:
    model, _ = load(tmp_path, "qwen3")
    object.__setattr__(model, "make_cache", lambda: [QuantizedKVCache() for _ in range(4)])
    with pytest.raises(ModelLoadError, match="'qwen3' uses the cache QuantizedKVCache"):
        discover_layout(model, "qwen3")


def test_positions_taken_from_the_shape_of_keys_are_each_row_s_own(tmp_path: Path) -> None:
    """afm7 derives positions from the shape of K that another layer wrote."""
    shape = {"hidden_dim": 64, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    run_probe(tmp_path, "afm7", ReferenceBackend(), dtype=mx.float32, **shape)


def test_a_failure_of_mlx_itself_is_reported(tmp_path: Path) -> None:
    if mx.metal.is_available():
        pytest.skip("MLX computes experts in bf16 on Metal")
    with pytest.raises(ModelLoadError, match=r"'qwen3_moe' fails in mlx-lm itself.*weights='int8'"):
        run_probe(tmp_path, "qwen3_moe", ReferenceBackend())


def wrong_positions(patch: pytest.MonkeyPatch) -> AttentionBackend:
    def offset(shim: hook.LayerCache) -> mx.array:
        return mx.array(shim.context.step.positions // 2 * 2)

    patch.setattr(hook.LayerCache, "offset", property(offset))
    return ReferenceBackend()


def wrong_scale(patch: pytest.MonkeyPatch) -> AttentionBackend:
    plain = hook._paged_attention
    patch.setattr(hook, "_paged_attention", lambda q, k, v, **kw: plain(q, k, v, scale=kw["scale"] * 1.5))
    return ReferenceBackend()


class _ChangedBackend(ReferenceBackend):
    def __init__(self, change: Callable[[PoolSpec], PoolSpec]) -> None:
        self._change = change

    def create_pool(self, spec: PoolSpec) -> Any:
        return super().create_pool(self._change(spec))


def windows_longer_by(count: int) -> Change:
    def change(spec: PoolSpec) -> PoolSpec:
        layers = (
            dataclasses.replace(layer, window=layer.window and layer.window + count) for layer in spec.layers
        )
        return dataclasses.replace(spec, layers=tuple(layers))

    return lambda _: _ChangedBackend(change)


def values_swapped_between_heads(patch: pytest.MonkeyPatch) -> AttentionBackend:
    write = hook.LayerCache.update_and_fetch

    def swapped(shim: hook.LayerCache, keys: mx.array, values: mx.array) -> Any:
        return write(shim, keys, values[:, ::-1])

    patch.setattr(hook.LayerCache, "update_and_fetch", swapped)
    return ReferenceBackend()


def neighbours_pages(patch: pytest.MonkeyPatch) -> AttentionBackend:
    begin = ReferencePool.begin_step

    def begin_shifted(pool: ReferencePool, metadata: AttentionMetadata) -> None:
        (group,) = metadata.groups
        shifted = group._replace(page_table=np.roll(group.page_table, 1, axis=0))
        begin(pool, dataclasses.replace(metadata, groups=(shifted,)))

    patch.setattr(ReferencePool, "begin_step", begin_shifted)
    return ReferenceBackend()


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("mistral", wrong_positions),
        ("gemma3_text", wrong_scale),
        ("mistral", windows_longer_by(1)),
        ("gemma3_text", windows_longer_by(1)),
        ("cohere2", windows_longer_by(-1)),
        ("gemma3_text", values_swapped_between_heads),
        ("cohere2", neighbours_pages),
    ],
)
@pytest.mark.few(3)
def test_mistakes_and_rounding_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mistake: Change
) -> None:
    model, layout = load(tmp_path, name)
    selection = select_rows(model, vocab_size=layout.vocab_size)
    probe.probe(model, layout, ReferenceBackend(), selection, architecture=name)
    backend = mistake(monkeypatch)
    with pytest.raises(ModelLoadError, match=r"paged cache \(logits of"):
        probe.probe(model, layout, backend, selection, architecture=name)


def test_a_window_the_cache_does_not_have_is_refused(tmp_path: Path) -> None:
    model, layout = load(tmp_path, "mistral")
    model.model.sliding_window = 7
    with pytest.raises(ModelLoadError, match="masks a window of 7 where its cache says 12"):
        probe.probe(
            model, layout, ReferenceBackend(), select_rows(model, vocab_size=320), architecture="mistral"
        )


def test_a_head_that_selection_does_not_reach_computes_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, layout = load(tmp_path, "llama")
    model.output_of_my_own = model.pop("lm_head")

    def call(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self.output_of_my_own(self.model(inputs, cache))
        return logits

    monkeypatch.setattr(type(model), "__call__", call)
    selection = select_rows(model, vocab_size=layout.vocab_size)
    result = probe.probe(model, layout, ReferenceBackend(), selection, architecture="llama")
    assert not result.selects_rows
    assert "every row" in probe.describe(result)
