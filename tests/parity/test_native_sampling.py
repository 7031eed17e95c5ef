"""Native draws against the sampler in NumPy: the same tokens, ties and failures included."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from native import at_every_level, require_extension, run_at_level
from octavo.engine.model.logit_rows import sample_in_numpy
from octavo.engine.params import SamplingParams
from octavo.engine.sampler import NOT_FINITE, SampleState

require_extension()

from octavo.engine.model.native_sampling import NativeSampling  # noqa: E402
from octavo.kernels import _ext  # noqa: E402

sample_natively = NativeSampling()
DTYPES = {"bf16": mx.bfloat16, "fp16": mx.float16, "fp32": mx.float32}
PARAMS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 300, "top_p": 0.9},
    {"top_k": 10**6},
    {"top_p": 1e-6},
    {"top_p": 0.4},
    {"top_p": 0.95},
    {"top_p": 0.999999},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 0.05, "top_p": 0.9},
    {"temperature": 100.0, "top_p": 0.5},
)


def logits_of(kind: str, size: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(size)
    row = rng.standard_normal(size).astype(np.float32)
    match kind:
        case "narrow":
            return row * np.float32(0.05)
        case "wide":
            return row * np.float32(30)
        case "ties":
            return np.round(row)
        case "equal":
            return np.zeros(size, np.float32)
        case "masked":
            row[rng.random(size) < 0.6] = -np.inf
            row[size // 2] = 1
    return row


def states(size: int, num: int, **params: object) -> list[SampleState]:
    settings = SamplingParams(**{"temperature": 0.8, **params})  # type: ignore[arg-type]
    return [
        SampleState(settings, seed=seed, prompt_ids=[0, 1 % size], vocab_size=size) for seed in range(num)
    ]


@pytest.mark.parametrize("kind", ["plain", "narrow", "wide", "ties", "equal", "masked"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_those_of_the_sampler_in_numpy(dtype: str, kind: str) -> None:
    check_tokens(dtype, kind, (1, 2, 7, 511, 513, 5000, 20_000))


def check_tokens(dtype: str, kind: str, sizes: tuple[int, ...]) -> None:
    for size, params in itertools.product(sizes, PARAMS):
        logits = mx.array(logits_of(kind, size)[None]).astype(DTYPES[dtype])
        drawing = states(size, 12, **params)
        rows = [0] * len(drawing)
        assert sample_natively(logits, rows, drawing) == sample_in_numpy(logits, rows, drawing), (
            size,
            params,
        )


@at_every_level
def test_every_level_draws_the_same(level: str) -> None:
    folder = str(Path(__file__).parent)
    code = "from test_native_sampling import check_tokens; check_tokens({dtype!r}, 'plain', (7, 5000))\n"
    checks = "".join(code.format(dtype=dtype) for dtype in DTYPES)
    run_at_level(level, f"import sys; sys.path.insert(0, {folder!r})\n{checks}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_zeros_are_one_value(dtype: str) -> None:
    logits = mx.array([[-1.0, -0.0, 0.0, -0.0, -3.0]]).astype(DTYPES[dtype])
    [greedy] = sample_natively(logits, [0], states(5, 1, temperature=0.0))
    assert greedy.token == 1, "the lowest id among equals, whatever their signs"
    drawing = states(5, 200, temperature=50.0, top_k=1)
    assert {drawn.token for drawn in sample_natively(logits, [0] * 200, drawing)} == {1, 2, 3}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(dtype: str, temperature: float) -> None:
    size = 600
    rows = np.zeros((7, size), np.float32)
    rows[1, 599], rows[2, 3], rows[3, 0] = np.nan, -np.nan, np.inf
    rows[4] = -np.inf
    rows[5, :599] = -np.inf
    logits = mx.array(rows).astype(DTYPES[dtype])
    drawn = sample_natively(logits, list(range(7)), states(size, 7, temperature=temperature))
    assert [one.error for one in drawn] == [None, *[NOT_FINITE] * 4, None, None]
    assert drawn[5].token == 599


def test_a_negative_nan_is_found_too() -> None:
    bits = np.zeros((1, 64), np.uint16)
    bits[0, 5] = 0xFFC1
    logits = mx.array(bits).view(mx.bfloat16)
    assert sample_natively(logits, [0], states(64, 1))[0].error == NOT_FINITE


def test_random_numbers_are_those_of_numpy() -> None:
    """The token that a flat row of 4096 draws is the upper 12 bits of the number."""
    logits = mx.zeros((1, 4096))
    for seed, counter in itertools.product((0, 1, 2**63, 2**64 - 1), (0, 1, 1000)):
        [token] = _ext.draw_tokens(
            logits,
            [_ext.Draw(0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed, counter=counter)],
        )
        assert token == int(np.random.Philox(key=seed, counter=counter).random_raw()) >> 52


@pytest.mark.parametrize("dtype", DTYPES)
def test_adjusted_rows_and_log_probabilities_come_out_the_same(dtype: str) -> None:
    size = 3000
    rng = np.random.default_rng(3)
    logits = mx.array(rng.standard_normal((4, size)).astype(np.float32)).astype(DTYPES[dtype])
    drawing = [
        *states(size, 2, top_p=0.9),
        *states(size, 2, repetition_penalty=1.3, top_p=0.8),
        *states(size, 2, logit_bias={5: 3.0}, presence_penalty=0.5),
        *states(size, 2, logprobs=3, top_k=20),
        *states(size, 1, temperature=0.0, logit_bias={7: 100.0}),
        *states(size, 1, temperature=0.0),
    ]
    rows = [i % 4 for i in range(len(drawing))]
    for state in drawing:
        state.record(11)
    assert sample_natively(logits, rows, drawing) == sample_in_numpy(logits, rows, drawing)
    bad = mx.where(mx.arange(size) == 9, mx.array(float("nan")), logits)
    assert {drawn.error for drawn in sample_natively(bad, rows, drawing)} == {NOT_FINITE}


CHANGES: tuple[dict[str, object], ...] = (
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "frequency_penalty": 0.2},
    {"presence_penalty": 1.0, "frequency_penalty": 0.3},
    {"logit_bias": {0: 2.0, 3: -5.0, 6: 0.25}},
    {"repetition_penalty": 1.1, "logit_bias": {2: 1.5}, "min_tokens": 5},
    {"min_tokens": 5},
)


@pytest.mark.parametrize("kind", ["plain", "narrow", "ties", "masked"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_changed_tokens_are_drawn_as_if_the_row_had_them(dtype: str, kind: str) -> None:
    for size, changes, params in itertools.product((7, 513, 6000), CHANGES, PARAMS[:9] + PARAMS[-3:]):
        logits = mx.array(logits_of(kind, size)[None]).astype(DTYPES[dtype])
        drawing = changed_states(size, 6, **(params | changes))
        rows = [0] * len(drawing)
        assert sample_natively(logits, rows, drawing) == sample_in_numpy(logits, rows, drawing), (
            size,
            changes,
            params,
        )


def changed_states(size: int, num: int, **params: object) -> list[SampleState]:
    """Of samples whose prompt is half the vocabulary, and that have three tokens by now."""
    settings = SamplingParams(**{"temperature": 0.8, **params})  # type: ignore[arg-type]
    drawing = []
    for seed in range(num):
        prompt = np.random.default_rng(seed).integers(0, size, size // 2).tolist()
        state = SampleState(settings, seed=seed, prompt_ids=prompt, vocab_size=size, end_ids=[1, size - 1])
        for token in (2, 3, 2):
            state.record(token)
        drawing.append(state)
    return drawing


def test_more_changes_than_16_bits_have_values_are_drawn_too() -> None:
    """A row in which each of 70 thousand tokens gets a logit of its own."""
    size = 70_000
    rng = np.random.default_rng(0)
    row = mx.array(rng.standard_normal((1, size)).astype(np.float32)).astype(mx.bfloat16)
    ids, changed = np.arange(size), rng.standard_normal(size).astype(np.float32)
    plain: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 0.9, "min_p": 0.0, "seed": 3}
    draws = [_ext.Draw(0, **plain, counter=i, changed_ids=ids, changed=changed) for i in range(8)]
    expected = [_ext.Draw(0, **plain, counter=i) for i in range(8)]
    assert _ext.draw_tokens(row, draws) == _ext.draw_tokens_from_numpy(changed[None], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_allowed_tokens_are_drawn_and_the_first_change_of_a_token_counts(dtype: str) -> None:
    size = 1000
    logits = mx.array(logits_of("plain", size)[None]).astype(DTYPES[dtype])
    allowed = np.arange(size) % 10 == 3
    plain: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3}
    drawn = _ext.draw_tokens(
        logits,
        [_ext.Draw(0, **plain, counter=i, allowed=allowed) for i in range(300)],
    )
    assert {token % 10 for token in drawn if token is not None} == {3}
    assert len(set(drawn)) > 20
    ids, changed = np.array([40, 40, 3]), np.array([50.3, -50.3, -50.3], np.float32)
    likeliest = _ext.Draw(0, **plain, counter=0, changed_ids=ids, changed=changed, allowed=allowed)
    assert _ext.draw_tokens(logits, [likeliest]) == [40]
    once, often = (
        [
            _ext.Draw(0, **plain, counter=i, changed_ids=np.full(n, 40), changed=np.full(n, 3.3, np.float32))
            for i in range(100)
        ]
        for n in (1, 600)
    )
    assert _ext.draw_tokens(logits, often) == _ext.draw_tokens(logits, once)
    for unusable in (np.nan, np.inf):
        changed = np.array([0.1, unusable, 0.1], np.float32)
        bad = _ext.Draw(0, **plain, counter=0, changed_ids=np.array([5, 6, 7]), changed=changed)
        assert _ext.draw_tokens(logits, [bad]) == [None]
    nothing = _ext.Draw(0, **plain, counter=0, allowed=np.zeros(size, np.bool_))
    assert _ext.draw_tokens(logits, [nothing]) == [None]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"changed_ids": np.array([4]), "changed": np.zeros(1, np.float32)},
            r"changed_ids .* \[0, 4\), got 4",
        ),
        ({"changed_ids": np.array([-1]), "changed": np.zeros(1, np.float32)}, r"got -1"),
        ({"changed_ids": np.array([1, 2]), "changed": np.zeros(1, np.float32)}, r"got 1 for 2"),
        ({"allowed": np.ones(3, np.bool_)}, "one flag for each of 4"),
        ({"row": 2}, r"row must lie in \[0, 2\), got 2"),
        ({"row": -1}, r"row must lie in \[0, 2\), got -1"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
    ],
)
def test_what_lies_out_of_range_is_refused(wrong: dict[str, Any], message: str) -> None:
    given = {
        "row": 0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "counter": 0,
    } | wrong
    draw = _ext.Draw(**given)
    with pytest.raises(ValueError, match=message):
        _ext.draw_tokens(mx.zeros((2, 4)), [draw])


def test_logits_must_be_rows_of_floats() -> None:
    with pytest.raises(ValueError, match=r"logits must be floats \[rows, vocabulary\], got float32 \[4\]"):
        _ext.draw_tokens(mx.zeros(4), [])
    with pytest.raises(ValueError, match="int32"):
        _ext.draw_tokens(mx.zeros((1, 4), mx.int32), [])
