from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map_with_path

import tiny_models
from attention_backends import BACKENDS, TestedBackend
from octavo.engine.api.errors import ModelLoadError
from octavo.engine.executor.adapt import cache_adapter as hook
from octavo.engine.executor.adapt.output_head import select_rows
from octavo.engine.executor.load import probe
from octavo.engine.executor.load.discover import discover_layout
from octavo.engine.executor.load.loader import load_model
from octavo.kernels.interface import AttendOptions, AttentionBackend, PoolSpec
from octavo.kernels.reference.backend import ReferenceBackend

pytestmark = pytest.mark.parity

Patch = pytest.MonkeyPatch
SCALES = (0.05, 8.0)
"""Multiples of the weights of tiny_models."""


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    chosen: TestedBackend = request.param
    return chosen.create()


def probe_of(
    folder: Path, scale: float, backend: AttentionBackend, name: str = "mistral"
) -> probe.ProbeResult:
    # On a CPU, MLX's experts support only float32.
    dtype = mx.float32 if name == "deepseek_v3" else mx.bfloat16
    loaded = load_model(tiny_models.make_model(folder, name, dtype=dtype), weights="keep")
    model = loaded.model
    model.update(
        tree_map_with_path(
            lambda name, value: value * scale if value.ndim > 1 and "embed" not in name else value,
            model.parameters(),
        )
    )
    layout = discover_layout(model, name)
    selection = select_rows(model, vocab_size=layout.vocab_size)
    return probe.probe(model, layout, backend, selection, architecture=name)


def neighbours_offset(patch: Patch) -> None:
    def offset(shim: hook.LayerCache) -> mx.array:
        positions = shim.context.step.positions
        return mx.array(np.roll(positions, 1)) if shim.layer == 3 else mx.array(positions)

    patch.setattr(hook.LayerCache, "offset", property(offset))


def longest_offset(patch: Patch) -> None:
    def offset(shim: hook.LayerCache) -> mx.array:
        step = shim.context.step
        return mx.full(step.num_tokens, int(step.kv_len.max()) - 1)

    patch.setattr(hook.LayerCache, "offset", property(offset))


def no_causal_mask(patch: Patch) -> None:
    attend = hook.LayerCache.attend

    def unmasked(shim: hook.LayerCache, queries: mx.array, *, scale: float, **_: Any) -> mx.array:
        if shim.spec.window is not None:
            return attend(shim, queries, scale=scale)
        step = shim.context.step
        lengths = step.kv_len[step.row_sequences]
        seen = mx.array(np.arange(int(lengths.max()))[None] < lengths[:, None])
        return shim.context.kv_cache.attend(shim.layer, queries, AttendOptions(scale=scale, mask=seen))

    patch.setattr(hook.LayerCache, "attend", unmasked)


def swapped(which: int) -> Callable[[Patch], None]:
    def change(patch: Patch) -> None:
        write = hook.LayerCache.update_and_fetch

        def swapping(shim: hook.LayerCache, *rows: mx.array) -> Any:
            keys, values = (part[:, ::-1] if part is rows[which] else part for part in rows)
            return write(shim, keys, values)

        patch.setattr(hook.LayerCache, "update_and_fetch", swapping)

    return change


class _ChangedWindows(ReferenceBackend):
    def __init__(self, by: int) -> None:
        self._by = by

    def create_pool(self, spec: PoolSpec) -> Any:
        layers = tuple(
            replace(layer, window=layer.window and layer.window + self._by) for layer in spec.layers
        )
        return super().create_pool(replace(spec, layers=layers))


@pytest.mark.parametrize("scale", SCALES)
def test_correct_models_are_served(tmp_path: Path, backend: AttentionBackend, scale: float) -> None:
    assert probe_of(tmp_path, scale, backend).error >= 0


def refusal(folder: Path, scale: float, backend: AttentionBackend, name: str = "mistral") -> str:
    try:
        probe_of(folder, scale, backend, name)
    except ModelLoadError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "mistake",
    [neighbours_offset, longest_offset, no_causal_mask, swapped(0), swapped(1)],
    ids=["a neighbour's offset", "the longest's offset", "no mask", "K heads", "V heads"],
)
@pytest.mark.few(7)
def test_a_mistake_is_refused_at_any_scale(
    tmp_path: Path,
    monkeypatch: Patch,
    backend: AttentionBackend,
    scale: float,
    mistake: Callable[[Patch], None],
) -> None:
    mistake(monkeypatch)
    assert "with a paged cache" in refusal(tmp_path, scale, backend)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (no_causal_mask, "if it is computed alone and in one chunk"),
        (neighbours_offset, "if it is computed alone and in one chunk"),
        (longest_offset, "if it is computed alone and in one chunk"),
        (lambda _: None, None),
    ],
    ids=["no mask", "a neighbour's offset", "the longest's offset", "nothing wrong"],
)
@pytest.mark.parametrize("scale", [1e-3, 1.0], ids=["no trace in the logits", "plain"])
def test_steps_beside_others_have_the_bits_of_one_alone(
    tmp_path: Path, monkeypatch: Patch, scale: float, mistake: Callable[[Patch], None], message: str | None
) -> None:
    native = next((chosen for chosen in BACKENDS if chosen.name == "cpu"), None)
    assert native is not None
    monkeypatch.setattr(probe, "_judge", lambda *_: None)
    monkeypatch.setattr(probe, "find_mistake", lambda *_: None)
    mistake(monkeypatch)
    reason = refusal(tmp_path, scale, native.create())
    assert reason == "" if message is None else message in reason


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("by", [1, -1])
def test_a_wrong_window_is_refused_at_any_scale(tmp_path: Path, scale: float, by: int) -> None:
    assert "with a paged cache" in refusal(tmp_path, scale, _ChangedWindows(by))


def changed_rotary(change: Callable[[mx.array], mx.array]) -> Callable[[Patch], None]:
    def patched(patch: Patch) -> None:
        attend = hook.LayerCache.attend

        def changing(shim: hook.LayerCache, queries: mx.array, **options: Any) -> mx.array:
            if (rotary := options.get("rotary")) is not None:
                options["rotary"] = change(rotary)
            return attend(shim, queries, **options)

        patch.setattr(hook.LayerCache, "attend", changing)

    return patched


@pytest.mark.parametrize("scale", SCALES)
def test_latents_that_are_right_are_served(tmp_path: Path, scale: float) -> None:
    result = probe_of(tmp_path, scale, ReferenceBackend(), "deepseek_v3")
    assert result.latents


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "mistake",
    [
        neighbours_offset,
        longest_offset,
        changed_rotary(mx.zeros_like),
        changed_rotary(lambda rotary: rotary[:, ::-1]),
    ],
    ids=["a neighbour's offset", "the longest's offset", "no rotary part", "other heads' rotary part"],
)
@pytest.mark.few(3)
def test_a_mistake_over_latents_is_refused_at_any_scale(
    tmp_path: Path, monkeypatch: Patch, scale: float, mistake: Callable[[Patch], None]
) -> None:
    mistake(monkeypatch)
    assert "with a paged cache" in refusal(tmp_path, scale, ReferenceBackend(), "deepseek_v3")
