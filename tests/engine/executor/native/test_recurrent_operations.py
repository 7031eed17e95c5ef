from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm, RMSNorm
from mlx_lm.models import activations as mlx_lm_activations
from mlx_lm.models import bailing_hybrid, granitemoehybrid, mamba2, nemotron_h, olmo_hybrid, qwen3_next
from mlx_lm.models import gated_delta as mlx_lm_delta

from native import require_extension

_ext = require_extension()

from octavo.engine.executor.native.activations import replace_activations  # noqa: E402
from octavo.engine.executor.native.modules import replace_modules  # noqa: E402
from octavo.engine.executor.native.norms import NativeGatedRMSNorm, kind_of_norm  # noqa: E402

TOLERANCES = [(mx.float32, 2e-6), (mx.bfloat16, 1e-2), (mx.float16, 2e-3)]


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)
    mx.random.seed(3)


def close(a: mx.array, b: mx.array, tolerance: float) -> bool:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    x, y = (np.array(value.astype(mx.float32)) for value in (a, b))
    return bool(np.abs(x - y).max() <= tolerance * np.abs(y).max())


class Sigmoid(Module):
    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight = mx.ones(size)
        self.eps = 1e-6

    def __call__(self, x: mx.array, gate: mx.array | None = None) -> mx.array:
        y = mx.fast.rms_norm(x, self.weight, self.eps)
        return y if gate is None else y * mx.sigmoid(gate)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize(
    ("kind", "gate_first", "group_size"),
    [
        (qwen3_next.Qwen3NextRMSNormGated, False, None),
        (olmo_hybrid.RMSNormGated, False, None),
        (mamba2.MambaRMSNormGated, True, None),
        (granitemoehybrid.GraniteMoeHybridRMSNormGated, True, None),
        (nemotron_h.MambaRMSNormGated, True, 24),
        (nemotron_h.MambaRMSNormGated, True, 6),
    ],
)
@pytest.mark.few(6)
def test_gated_norms_of_model_files_become_native(
    kind: Any, gate_first: bool, group_size: int | None, dtype: mx.Dtype, tolerance: float
) -> None:
    holder: Any = Module()
    holder.norm = kind(24) if group_size is None else kind(24, 1e-5, group_size)
    holder.norm.weight = mx.random.normal((24,)).astype(dtype)
    x, gate, other = (mx.random.normal((1, 3, 2, 24)).astype(dtype) for _ in range(3))
    x = x * mx.repeat(mx.array([1.0, 8.0, 0.1, 3.0], dtype), 6)
    cases = [(x, gate), (other, gate)] + [(x, None)] * (kind is not olmo_hybrid.RMSNormGated)
    wanted = [holder.norm(*case) for case in cases]
    wide = holder.norm(x.astype(mx.float32), gate)
    mx.eval(wanted, wide)
    report = replace_modules(holder, exact=False, fuse=False)
    assert report.replaced == {kind.__name__: 1}
    assert isinstance(holder.norm, NativeGatedRMSNorm)
    assert holder.norm.gate_first is gate_first
    for case, y in zip(cases, wanted, strict=True):
        assert close(holder.norm(*case), y, tolerance)
    assert close(holder.norm(x.astype(mx.float32), gate), wide, 1e-2), "what does not fit is the model's own"
    replace_modules(holder, exact=False, fuse=False)
    assert holder.norm.plain is kind, "its own code is lost"


def test_other_modules_than_gated_norms_do_not_change() -> None:
    for module in (Sigmoid(8), RMSNorm(8), Linear(8, 8), LayerNorm(8), bailing_hybrid.GroupRMSNorm(8)):
        assert kind_of_norm(module) is None, type(module).__name__


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_norms_of_q_and_k_are_mlx_lms(dtype: mx.Dtype, tolerance: float) -> None:
    replace_activations()
    rows = mx.random.normal((1, 5, 8 * 32)).astype(dtype)
    q, k = (part.reshape(1, 5, -1, 32) for part in mx.split(rows, [64], axis=-1))
    ours: Any = mlx_lm_delta.normalize_qk
    assert vars(qwen3_next)["normalize_qk"] is ours, "the model file calls mlx-lm's own"
    for inv_scale in (32**-0.5, 0.3):
        got = ours(q, k, inv_scale=inv_scale, eps=1e-6)
        wanted = ours.original(q, k, inv_scale=inv_scale, eps=1e-6)
        assert all(close(a, b, tolerance) for a, b in zip(got, wanted, strict=True))
    mixed = ours(q.astype(mx.float32), k, inv_scale=0.5, eps=1e-6)
    assert [x.dtype for x in mixed] == [mx.float32, dtype]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_precise_swiglu_is_mlx_lms(dtype: mx.Dtype, tolerance: float) -> None:
    replace_activations()
    h, gate, x = (mx.random.normal((2, 3, 40)).astype(dtype) for _ in range(3))
    ours: Any = mlx_lm_activations.precise_swiglu
    wanted = ours.original(h, gate, x)
    assert close(ours(h, gate, x), wanted, tolerance)
    wide = ours(h.astype(mx.float32), gate, x)
    assert wide.dtype == mx.float32, "it takes the type of h"


def test_rows_after_a_window_are_not_copied() -> None:
    window, rows = mx.zeros((1, 3, 8)), mx.random.normal((1, 5, 8))
    both = mx.concatenate([window, rows], axis=1)
    assert mx.array_equal(_ext.rows_behind(both, 3), rows[0])
    text = graph_of(_ext.rows_behind(mx.concatenate([window, rows + 1], axis=1), 3))
    assert "Concatenate" not in text
    for count in (0, 2, 4):
        assert mx.array_equal(
            _ext.rows_behind(mx.concatenate([window, rows], axis=1), count), both[0, count:]
        )
    mx.eval(both)
    assert mx.array_equal(_ext.rows_behind(both, 3), rows[0])
    across = mx.concatenate([mx.zeros((1, 3, 8)), mx.ones((1, 3, 8))], axis=2)
    assert mx.array_equal(_ext.rows_behind(across, 3), across[0, 3:])
    with pytest.raises(ValueError, match="with at least 9 rows, got"):
        _ext.rows_behind(both, 9)


def graph_of(x: mx.array) -> str:
    import io

    text = io.StringIO()
    mx.export_to_dot(text, x)
    return text.getvalue()
