from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from native import at_every_level, require_extension, run_at_level
from octavo.engine.api.outputs import TokenLogprob
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor.sampling.logit_rows import Sampler, Target, float_row
from octavo.engine.executor.sampling.sampler import NO_TOKEN_LEFT, NOT_FINITE, Sampled, SampleState

require_extension()

from octavo.engine.executor.sampling.native_sampling import NativeSampler  # noqa: E402
from octavo.kernels import _ext  # noqa: E402

pytestmark = pytest.mark.parity

sample_natively = NativeSampler().sample
sample_in_numpy = Sampler().sample
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


def kinds(*names: str) -> list[tuple[str, str]]:
    return [(dtype, kind) for i, dtype in enumerate(DTYPES) for kind in names[i % 2 :: 2]]


def states(size: int, num: int, **params: object) -> list[SampleState]:
    settings = SamplingParams(**{"temperature": 0.8, **params})  # type: ignore[arg-type]
    return [
        SampleState(settings, seed=seed, prompt_ids=[0, 1 % size], vocab_size=size) for seed in range(num)
    ]


@pytest.mark.parametrize(("dtype", "kind"), kinds("plain", "narrow", "wide", "ties", "equal", "masked"))
@pytest.mark.few(5)
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
def test_every_level_samples_from_large_rows_as_defined(level: str) -> None:
    checks = "".join(f"check_large({kind!r}, (40_001,))\n" for kind in LARGE)
    folder = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {folder!r})\nfrom test_native_sampling import check_large\n"
    run_at_level(level, code + checks)


@at_every_level
def test_every_level_samples_the_same(level: str) -> None:
    folder = str(Path(__file__).parent)
    code = "from test_native_sampling import check_tokens; check_tokens({dtype!r}, 'plain', (7, 5000))\n"
    checks = "".join(code.format(dtype=dtype) for dtype in DTYPES)
    run_at_level(level, f"import sys; sys.path.insert(0, {folder!r})\n{checks}")


def large_row(kind: str, size: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(size)
    row = rng.standard_normal(size).astype(np.float32)
    match kind:
        case "runs":
            row[np.arange(size) // 512 % 7 == 3] += 6
        case "falling":
            row -= np.linspace(0, 12, size, dtype=np.float32)
        case "one":
            row[size - 3] = 30
        case "few":
            row[rng.permutation(size)[40:]] = -np.inf
        case "ties":
            return np.round(row)
        case "two values":
            return np.where(np.arange(size) % 3 == 0, row.dtype.type(1), row.dtype.type(0))
        case "equal":
            return np.full(size, 0.25, np.float32)
        case "wide":
            return row * np.float32(3)
    return row


LARGE = ("plain", "runs", "falling", "one", "few", "ties", "two values", "equal", "wide")


def kept_by(weights: NDArray[np.float64], top_p: float) -> NDArray[np.float64]:
    order = np.argsort(-weights, kind="stable")
    reached = np.cumsum(weights[order])
    end = min(int(np.searchsorted(reached, top_p * reached[-1] * (1 - 1e-12))), len(weights) - 1)
    kept = np.zeros_like(weights)
    kept[order[: end + 1]] = weights[order[: end + 1]]
    return kept


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.few(5)
def test_large_rows_are_sampled_as_defined(kind: str) -> None:
    check_large(kind, (16_384, 16_385, 151_936))


def check_large(kind: str, sizes: tuple[int, ...]) -> None:
    for size, top_p, temperature in itertools.product(sizes, (0.3, 0.9, 1 - 2**-53), (1.0, 0.7)):
        row = large_row(kind, size)
        weights = np.exp((row.astype(np.float64) - row.max()) / temperature)
        shares = kept_by(weights, top_p)
        ends = np.cumsum(shares / shares.sum())
        how = PLAIN | {"temperature": temperature, "top_p": top_p, "seed": size}
        draws = [_ext.Draw(0, **how, counter=counter) for counter in range(20)]
        for counter, token in enumerate(tokens_of(mx.array(row[None]), draws)):
            uniform = (int(np.random.Philox(key=size, counter=counter).random_raw()) >> 11) * 2.0**-53
            assert token is not None
            assert ends[token] - shares[token] / shares.sum() - 2e-6 <= uniform <= ends[token] + 2e-6, (
                size,
                top_p,
                temperature,
                token,
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_zeros_are_one_value(dtype: str) -> None:
    logits = mx.array([[-1.0, -0.0, 0.0, -0.0, -3.0]]).astype(DTYPES[dtype])
    [greedy] = sample_natively(logits, [0], states(5, 1, temperature=0.0))
    assert greedy.token == 1, "the lowest id among equals, whatever their signs"
    drawing = states(5, 200, temperature=50.0, top_k=1)
    assert {drawn.token for drawn in sample_natively(logits, [0] * 200, drawing)} == {1, 2, 3}
    for num_top, largest in ((1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3, 0])):
        [scored] = sample_natively(logits, [0], states(5, 1, temperature=0.0, logprobs=num_top))
        assert scored.logprob is not None
        assert scored.token == 1
        assert [token for token, _ in scored.logprob.top] == largest


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


def test_random_numbers_are_those_of_numpy() -> None:
    """For a flat row of 4096 tokens, the sampled token is the upper 12 bits of the random number."""
    logits = mx.zeros((1, 4096))
    for seed, counter in itertools.product((0, 1, 2**63, 2**64 - 1), (0, 1, 1000)):
        [drawn] = _ext.draw_tokens(
            logits, [_ext.Draw(0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed, counter=counter)]
        )
        assert drawn.token == int(np.random.Philox(key=seed, counter=counter).random_raw()) >> 52


def score_in_float64(logits: NDArray[np.float32], token: int, num_top: int) -> TokenLogprob:
    exact = logits.astype(np.float64)
    logprobs = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    order = np.argsort(-exact, kind="stable")[:num_top]
    top = tuple((int(i), float(logprobs[i])) for i in order if np.isfinite(exact[i]))
    return TokenLogprob(token, float(logprobs[token]), top)


def assert_same(drawn: Sampled, expected: Sampled) -> None:
    assert (drawn.token, drawn.error) == (expected.token, expected.error)
    assert (drawn.logprob is None) == (expected.logprob is None)
    if drawn.logprob is not None and expected.logprob is not None:
        assert_same_score(drawn.logprob, expected.logprob)


def assert_same_score(score: TokenLogprob, expected: TokenLogprob) -> None:
    assert score.token_id == expected.token_id
    assert [token for token, _ in score.top] == [token for token, _ in expected.top]
    logprobs = [score.logprob, *(logprob for _, logprob in score.top)]
    truth = [expected.logprob, *(logprob for _, logprob in expected.top)]
    np.testing.assert_allclose(logprobs, truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "kind"), kinds("plain", "narrow", "wide", "ties", "equal", "masked"))
def test_log_probabilities_are_those_of_float64(dtype: str, kind: str) -> None:
    check_scores(dtype, kind, (1, 2, 63, 65, 513, 5000))


def check_scores(dtype: str, kind: str, sizes: tuple[int, ...]) -> None:
    for size, num_top in itertools.product(sizes, (0, 1, 5, 20)):
        logits = mx.array(logits_of(kind, size)[None]).astype(DTYPES[dtype])
        row = float_row(logits, 0)
        tokens = {0, size // 2, size - 1, int(row.argmin()), int(row.argmax())}
        scores = NativeSampler().score(logits, [Target(0, token, num_top) for token in tokens])
        for token, score in zip(tokens, scores, strict=True):
            assert score is not None
            assert_same_score(score, score_in_float64(row, token, num_top))
        for params in (
            {"temperature": 0.0},
            {"temperature": 1.0, "top_k": 3},
            {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 0.7},
        ):
            drawing = states(size, 2, logprobs=num_top, **params)
            for drawn in sample_natively(logits, [0, 0], drawing):
                assert drawn.token is not None
                assert drawn.logprob is not None
                assert_same_score(drawn.logprob, score_in_float64(row, drawn.token, num_top))


@at_every_level
def test_every_level_scores_the_same(level: str) -> None:
    folder = str(Path(__file__).parent)
    code = "from test_native_sampling import check_scores; check_scores({dtype!r}, 'plain', (7, 5000))\n"
    checks = "".join(code.format(dtype=dtype) for dtype in DTYPES)
    run_at_level(level, f"import sys; sys.path.insert(0, {folder!r})\n{checks}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite_have_no_scores(dtype: str) -> None:
    rows = np.zeros((4, 100), np.float32)
    rows[1, 99], rows[2] = np.nan, -np.inf
    rows[3, 7] = np.inf
    targets = [Target(row, 5, 3) for row in range(4)]
    for sampling in (NativeSampler(), Sampler()):
        scores = sampling.score(mx.array(rows).astype(DTYPES[dtype]), targets)
        assert [score is None for score in scores] == [False, True, True, True]


CHANGES: tuple[dict[str, object], ...] = (
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "frequency_penalty": 0.2},
    {"presence_penalty": 1.0, "frequency_penalty": 0.3},
    {"logit_bias": {0: 2.0, 3: -5.0, 6: 0.25}},
    {"repetition_penalty": 1.1, "logit_bias": {2: 1.5}, "min_tokens": 5},
    {"min_tokens": 5},
    {"repetition_penalty": 1.3, "presence_penalty": 0.7, "logit_bias": {4: 9.0}, "logprobs": 20},
)


@pytest.mark.parametrize(("dtype", "kind"), kinds("plain", "narrow", "ties", "masked"))
@pytest.mark.few(3)
def test_changed_tokens_are_sampled_as_if_the_row_had_them(dtype: str, kind: str) -> None:
    for size, changes, params in itertools.product((7, 513, 6000), CHANGES, PARAMS[:9] + PARAMS[-3:]):
        logits = mx.array(logits_of(kind, size)[None]).astype(DTYPES[dtype])
        drawing = changed_states(size, 6, **(params | changes))
        rows = [0] * len(drawing)
        for drawn, expected in zip(
            sample_natively(logits, rows, drawing), sample_in_numpy(logits, rows, drawing), strict=True
        ):
            assert_same(drawn, expected)


def changed_states(size: int, num: int, **params: object) -> list[SampleState]:
    settings = SamplingParams(**{"temperature": 0.8, **params})  # type: ignore[arg-type]
    drawing = []
    for seed in range(num):
        prompt = np.random.default_rng(seed).integers(0, size, size // 2).tolist()
        state = SampleState(settings, seed=seed, prompt_ids=prompt, vocab_size=size, end_ids=[1, size - 1])
        for token in (2, 3, 2):
            state.record(token)
        drawing.append(state)
    return drawing


def changes_of(**given: Any) -> _ext.LogitAdjustments:
    nobody, nothing = np.empty(0, np.int64), np.empty(0, np.float32)
    return _ext.LogitAdjustments(
        bias_ids=given.pop("bias_ids", nobody),
        bias=given.pop("bias", nothing),
        seen_ids=given.pop("seen_ids", nobody),
        repetition_penalty=given.pop("repetition_penalty", 1.0),
        output_ids=given.pop("output_ids", nobody),
        output_counts=given.pop("output_counts", nothing),
        frequency_penalty=given.pop("frequency_penalty", 0.0),
        presence_penalty=given.pop("presence_penalty", 0.0),
        suppressed_ids=given.pop("suppressed_ids", nobody),
        **given,
    )


PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3}


def tokens_of(logits: mx.array, draws: list[_ext.Draw]) -> list[int | None]:
    return [drawn.token for drawn in _ext.draw_tokens(logits, draws)]


def test_more_changes_than_16_bits_have_values_are_sampled_too() -> None:
    size = 70_000
    changed = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    changes = changes_of(bias_ids=np.arange(size), bias=changed)
    how = PLAIN | {"top_p": 0.9, "num_top": 5}
    draws = [_ext.Draw(0, **how, counter=i, changes=changes) for i in range(8)]
    expected = [_ext.Draw(0, **how, counter=i) for i in range(8)]
    row = mx.zeros((1, size), mx.bfloat16)
    for drawn, other in zip(
        _ext.draw_tokens(row, draws), _ext.draw_tokens(mx.array(changed[None]), expected), strict=True
    ):
        assert drawn.token == other.token
        assert drawn.score is not None
        assert other.score is not None
        assert (drawn.score.logprob, drawn.score.top) == (other.score.logprob, other.score.top)


@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_of_one_token_are_made_one_after_the_other(dtype: str) -> None:
    logits = mx.array([[0.0, 1.0, 2.0, -3.0]]).astype(DTYPES[dtype])
    ids = np.array([3, 1])
    changes = changes_of(
        bias_ids=ids,
        bias=np.array([5.3, 1.0], np.float32),
        seen_ids=ids,
        repetition_penalty=2.0,
        output_ids=ids[:1],
        output_counts=np.array([3.0], np.float32),
        frequency_penalty=0.25,
        presence_penalty=0.5,
        suppressed_ids=np.array([2]),
    )
    [drawn] = _ext.draw_tokens(
        logits, [_ext.Draw(0, **PLAIN | {"temperature": 0.0, "num_top": 4}, counter=0, changes=changes)]
    )
    third = np.float32(np.float32(np.float32(-3 + 5.3) / 2) - np.float32(0.75)) - np.float32(0.5)
    expected = np.array([0.0, 1.0, -np.inf, third], np.float32)
    assert drawn.token == 1
    assert drawn.score is not None
    assert_same_score(
        TokenLogprob(1, drawn.score.logprob, tuple(drawn.score.top)), score_in_float64(expected, 1, 4)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_allowed_tokens_are_sampled(dtype: str) -> None:
    size = 1000
    logits = mx.array(logits_of("plain", size)[None]).astype(DTYPES[dtype])
    allowed = np.arange(size) % 10 == 3
    drawn = tokens_of(logits, [_ext.Draw(0, **PLAIN, counter=i, allowed=allowed) for i in range(300)])
    assert {token % 10 for token in drawn if token is not None} == {3}
    assert len(set(drawn)) > 20
    bias = np.array([80.3, 60.3, -50.3], np.float32)
    changes = changes_of(bias_ids=np.array([40, 43, 3]), bias=bias)
    likeliest = _ext.Draw(0, **PLAIN, counter=0, changes=changes, allowed=allowed)
    assert tokens_of(logits, [likeliest]) == [43], "40 is not allowed, whatever its bias"
    for unusable in (np.nan, np.inf):
        changes = changes_of(bias_ids=np.array([5, 6]), bias=np.array([0.1, unusable], np.float32))
        assert tokens_of(logits, [_ext.Draw(0, **PLAIN, counter=0, changes=changes)]) == [None]
    nothing = _ext.Draw(0, **PLAIN, counter=0, allowed=np.zeros(size, np.bool_))
    assert tokens_of(logits, [nothing]) == [None]


ONE = np.zeros(1, np.float32)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"changes": changes_of(bias_ids=np.array([4]), bias=ONE)}, r"bias_ids must .* \[0, 4\), got 4"),
        ({"changes": changes_of(bias_ids=np.array([-1]), bias=ONE)}, r"bias_ids .*got -1"),
        ({"changes": changes_of(seen_ids=np.array([0, 4]))}, r"seen_ids .*got 4"),
        ({"changes": changes_of(output_ids=np.array([9]), output_counts=ONE)}, r"output_ids .*got 9"),
        ({"changes": changes_of(suppressed_ids=np.array([-2]))}, r"suppressed_ids .*got -2"),
        ({"changes": changes_of(bias_ids=np.array([1, 2]), bias=ONE)}, r"bias needs .*got 1 for 2"),
        ({"changes": changes_of(output_counts=ONE)}, r"output_counts needs .*got 1 for 0"),
        ({"allowed": np.ones(3, np.bool_)}, "one flag for each of 4"),
        ({"row": 2}, r"row must lie in \[0, 2\), got 2"),
        ({"row": -1}, r"row must lie in \[0, 2\), got -1"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"num_top": -1}, r"num_top must lie in \[0, 1024\], got -1"),
        ({"num_top": 1025}, "got 1025"),
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, Any], message: str) -> None:
    draw = _ext.Draw(**{"row": 0, "counter": 0} | PLAIN | wrong)
    with pytest.raises(ValueError, match=message):
        _ext.draw_tokens(mx.zeros((2, 4)), [draw])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ((2, 0, 0), r"row must lie in \[0, 2\), got 2"),
        ((0, 4, 0), r"token must lie in \[0, 4\), got 4"),
        ((0, -1, 0), "token .*got -1"),
        ((0, 0, -1), "num_top .*got -1"),
    ],
)
def test_targets_out_of_range_are_refused(target: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ext.score_tokens(mx.zeros((2, 4)), [target])


def test_logits_must_be_rows_of_floats() -> None:
    with pytest.raises(ValueError, match=r"logits must be floats \[rows, vocabulary\], got float32 \[4\]"):
        _ext.draw_tokens(mx.zeros(4), [])
    with pytest.raises(ValueError, match="int32"):
        _ext.draw_tokens(mx.zeros((1, 4), mx.int32), [])


def test_the_error_names_the_cause_if_no_token_is_allowed() -> None:
    held = SampleState(
        SamplingParams(min_tokens=1), seed=0, prompt_ids=(), vocab_size=8, end_ids=tuple(range(8))
    )
    rows = mx.array(np.stack([np.zeros(8), np.full(8, np.nan)]).astype(np.float32))
    mx.eval(rows)
    nothing_left, broken = sample_natively(rows, [0, 1], [held, held])
    assert nothing_left == Sampled(token=None, error=NO_TOKEN_LEFT, invalid=True)
    assert broken == Sampled(token=None, error=NOT_FINITE)
    assert sample_in_numpy(rows, [0, 1], [held, held]) == [nothing_left, broken]
