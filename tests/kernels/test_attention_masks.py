from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from attention_backends import BACKENDS, TestedBackend, poison
from attention_cases import Case, as_numpy, build_metadata, shuffled_tables
from octavo.kernels.groups import LayerGroup
from octavo.kernels.interface import AttendOptions, PagedKVCache
from octavo.kernels.kv_cache import GroupedKVCache
from octavo.kernels.metadata import AttentionMetadata

pytestmark = pytest.mark.parity

SEQUENCES = ((0, 21), (0, 1), (0, 9), (0, 9))
TOKENS, LONGEST, HEADS = 40, 21, 4
CASE = Case(name="", sequences=SEQUENCES, page_size=8, head_dim=32, window=6, keep=2)

Floats = NDArray[np.float64]


class Step:
    """Four prompts in a pool whose other pages are NaN."""

    def __init__(self, tested: TestedBackend, rng: np.random.Generator) -> None:
        self.pool = tested.create().create_pool(CASE.spec("fp16", "fp16"))
        poison(self.pool)
        tables = shuffled_tables(CASE, rng, self.pool.spec.num_pages)
        self.metadata: AttentionMetadata = build_metadata(list(SEQUENCES), tables, 8)
        self.queries, self.keys, self.values = (
            rng.standard_normal((TOKENS, heads, 32)).astype(np.float16) for heads in (HEADS, 2, 2)
        )
        self.pool.begin_step(self.metadata)
        self.pool.write(0, mx.array(self.keys), mx.array(self.values))

    def attend(self, **given: mx.array | float | None) -> Floats:
        out = self.pool.attend(0, mx.array(self.queries), AttendOptions(scale=0.2, **given))  # type: ignore[arg-type]
        mx.eval(out, *self.pool.pending())
        return as_numpy(out).astype(np.float64)

    def truth(self, bias: Floats, softcap: float | None = None) -> Floats:
        out = np.zeros((TOKENS, HEADS, 32))
        for first, stop in zip(self.metadata.q_start[:-1], self.metadata.q_start[1:], strict=True):
            q, k, v = (x[first:stop].astype(np.float64) for x in (self.queries, self.keys, self.values))
            logits = np.einsum("thd,lhd->thl", q, np.repeat(k, 2, 1)) * 0.2
            if softcap is not None:
                logits = softcap * np.tanh(logits / softcap)
            weights = np.exp(logits + bias[first:stop, :, : stop - first])
            total = weights.sum(-1, keepdims=True)
            weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
            out[first:stop] = np.einsum("thl,lhd->thd", weights, np.repeat(v, 2, 1))
        return out

    def causal(self, window: int | None = None, keep: int = 0) -> NDArray[np.bool_]:
        """Return the causal mask [T, L], which attention applies if no mask is given."""
        at, seen = self.metadata.positions[:, None], np.arange(LONGEST)
        visible: NDArray[np.bool_] = seen <= at
        return visible if window is None else visible & ((seen > at - window) | (seen < keep))


@pytest.fixture(params=BACKENDS, ids=lambda tested: tested.name)
def step(request: pytest.FixtureRequest) -> Step:
    return Step(request.param, np.random.default_rng(7))


def close(got: Floats, want: Floats) -> bool:
    return float(np.abs(got - want).max() / np.abs(want).max()) < 2e-3


def bias_of(visible: NDArray[np.bool_]) -> Floats:
    bias = np.where(visible, 0.0, -np.inf)
    return np.broadcast_to(bias if bias.ndim == 3 else bias[:, None], (TOKENS, HEADS, LONGEST))


def test_the_layers_own_rule_given_as_a_mask_changes_nothing(step: Step) -> None:
    own = step.attend()
    np.testing.assert_array_equal(own, step.attend(mask=mx.array(step.causal(6, 2))))
    assert close(step.attend(mask=mx.array(step.causal())), step.truth(bias_of(step.causal())))
    assert not close(own, step.truth(bias_of(step.causal()))), "the window of this layer matters"


@pytest.mark.parametrize("shape", [(TOKENS, LONGEST), (TOKENS, HEADS, LONGEST)])
def test_any_boolean_mask(step: Step, shape: tuple[int, ...]) -> None:
    mask = np.random.default_rng(1).random(shape) < 0.4
    mask[3] = False
    got = step.attend(mask=mx.array(mask))
    assert close(got, step.truth(bias_of(mask)))
    assert not got[3].any()
    assert np.isfinite(got).all()


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_any_additive_mask(step: Step, softcap: float | None, dtype: mx.Dtype) -> None:
    mask = np.random.default_rng(2).standard_normal((TOKENS, HEADS, LONGEST)).astype(np.float16)
    mask[np.random.default_rng(3).random(mask.shape) < 0.3] = -np.inf
    got = step.attend(mask=mx.array(mask).astype(dtype), softcap=softcap)
    assert close(got, step.truth(mask.astype(np.float64), softcap))


def test_grouped_pools_hand_masks_on(step: Step) -> None:
    cache: PagedKVCache = GroupedKVCache([step.pool], [LayerGroup(window=None, keep=0, members=(0,))])
    mask = mx.array(np.random.default_rng(1).random((TOKENS, LONGEST)) < 0.4)
    out = cache.attend(0, mx.array(step.queries), AttendOptions(scale=0.2, mask=mask))
    np.testing.assert_array_equal(as_numpy(out), step.attend(mask=mask))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mask": mx.zeros((TOKENS, LONGEST + 1))}, r"mask must be \(40, 21\) or \(40, 4, 21\), .* got"),
        ({"mask": mx.zeros((TOKENS, 2, LONGEST))}, "mask must be"),
        ({"mask": mx.zeros((TOKENS, LONGEST), mx.int32)}, "mask must be bool or of a float type, got"),
    ],
)
def test_masks_of_wrong_shape_are_refused(step: Step, given: dict[str, mx.array], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step.attend(**given)


def test_values_of_1e30_below_hide_and_nan_is_not_lost(step: Step) -> None:
    visible = step.causal()
    visible[5] = False
    rows = [np.where(visible, 0.0, low).astype(np.float32) for low in (-np.inf, -1e30, -3.4e38)]
    outs = [step.attend(mask=mx.array(row)) for row in rows]
    for out in outs:
        np.testing.assert_array_equal(out, outs[0])
    assert not outs[0][5].any()
    rows[0][7, 2] = np.nan
    out = step.attend(mask=mx.array(rows[0]))
    assert np.isnan(out[7]).all()
    np.testing.assert_array_equal(np.delete(out, 7, 0), np.delete(outs[0], 7, 0))
