"""Reference of the parity probe: mlx-lm's logits, and the effect of rounding on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from ..cache_layout import CacheLayout
from ..mlx_lm_import import cache as caches_of_mlx_lm
from ..overrides import overridden
from .discover import map_leaves

STATE_CHUNK = 3  # tokens per forward, for models with recurrent states
MAX_COLUMNS = 8192  # logits compared per row
CACHE_STEP = 16
MORE_NOISES = 4
"""Number of additional perturbations."""

Errors = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reference:
    sequences: list[list[int]]
    logits: list[NDArray[np.float32]]
    noise: Errors
    worst: float
    precision: float
    chunk: int
    num_noises: int = 1

    @property
    def median_limit(self) -> float:
        return 4 * float(np.median(self.noise)) + self.precision

    @property
    def worst_limit(self) -> float:
        return min(10 * self.worst, max(0.4, 2 * self.worst)) + self.precision

    @property
    def longest(self) -> int:
        return max(len(tokens) for tokens in self.sequences)


def make_reference(model: Module, layout: CacheLayout, steps: list[tuple[int, int, int]]) -> Reference:
    rng = np.random.default_rng(0)
    lengths = [sum(counts) for counts in zip(*steps, strict=True)]
    sequences = [rng.integers(0, layout.vocab_size, length).tolist() for length in lengths]
    precision = 2.0**-8 if layout.dtype == mx.bfloat16 else 2.0**-10
    chunk = STATE_CHUNK if layout.entries else max(lengths)
    pairs = [_plain_and_noisy(model, tokens, precision, chunk) for tokens in sequences]
    logits, noisy = [plain for plain, _ in pairs], [noisy for _, noisy in pairs]
    noise = np.concatenate([row_errors(a, b) for a, b in zip(noisy, logits, strict=True)])
    return Reference(sequences, logits, noise, float(noise.max()), precision, chunk)


def with_more_noise(reference: Reference, model: Module) -> Reference:
    errors = []
    for seed in range(1, 1 + MORE_NOISES):
        with _perturbed_layers(model, reference.precision, seed):
            pairs = [
                _plain_and_noisy(model, tokens, reference.precision, reference.chunk, seed)
                for tokens in reference.sequences
            ]
        errors.append(np.concatenate([row_errors(noisy, plain) for plain, noisy in pairs]))
    noise = np.maximum(reference.noise, np.mean(errors, axis=0))
    return replace(
        reference,
        noise=noise,
        worst=max(reference.worst, float(np.max(errors))),
        num_noises=1 + MORE_NOISES,
    )


def _plain_and_noisy(
    model: Module, tokens: list[int], precision: float, chunk: int, seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    caches = _perturbed_caches(model, precision, seed)
    parts = [
        evaluated(model(mx.array([tokens[first : first + chunk]] * 2), cache=caches))
        for first in range(0, len(tokens), chunk)
    ]
    plain, noisy = np.concatenate(parts, axis=1)
    return plain, noisy


def row_errors(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> Errors:
    """Return the relative RMS error of each row [.., V]. Logits are centred first."""
    finite = np.isfinite(wanted)  # some models mask unused tokens with -infinity
    if not np.array_equal(finite, np.isfinite(got)):
        return np.full(len(got), np.nan)
    wanted, got = np.where(finite, wanted, 0).astype(np.float64), np.where(finite, got, 0).astype(np.float64)
    wanted, got = (rows - rows.mean(-1, keepdims=True) for rows in (wanted, got))
    scale = np.sqrt(np.mean(wanted**2, axis=-1)) + 1e-12
    errors: Errors = np.sqrt(np.mean((got - wanted) ** 2, axis=-1)) / scale
    return errors


def _nudging(precision: float, first_key: int) -> Callable[[mx.array], mx.array]:
    keys = (mx.random.key(i) for i in itertools.count(first_key))

    def nudged(x: mx.array) -> mx.array:
        sign = mx.random.bernoulli(0.5, x.shape, key=next(keys))
        clean = mx.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) < len(x) // 2
        factor = mx.where(clean, 1, mx.where(sign, 1 + precision, 1 - precision))
        return x * factor.astype(x.dtype)

    return nudged


def _perturbed_layers(model: Module, precision: float, seed: int) -> AbstractContextManager[None]:
    nudged = _nudging(precision, (seed << 16) + (1 << 15))

    def call(module: Module, *args: Any, **kwargs: Any) -> Any:
        given = type(module).__bases__[0].__call__(module, *args, **kwargs)
        batched = isinstance(given, mx.array) and given.ndim > 1 and given.shape[0] == 2
        return nudged(given) if batched and mx.issubdtype(given.dtype, mx.floating) else given

    return overridden((module for _, module in model.named_modules() if not module.children()), call)


def _perturbed_caches(model: Module, precision: float, seed: int = 0) -> list[Any]:
    nudged = _nudging(precision, seed << 16)

    def perturbed(cache: Any) -> Any:
        if isinstance(cache, caches_of_mlx_lm.ArraysCache):
            return _PerturbedState(len(cache.cache), nudged)
        cache.step = CACHE_STEP
        store = cache.update_and_fetch
        cache.update_and_fetch = lambda k, v: store(nudged(k), nudged(v))
        return cache

    return map_leaves(caches_of_mlx_lm.make_prompt_cache(model), perturbed)


class _PerturbedState(caches_of_mlx_lm.ArraysCache):
    def __init__(self, size: int, nudged: Callable[[mx.array], mx.array]) -> None:
        super().__init__(size)
        self._nudged = nudged

    def __setitem__(self, entry: int, value: mx.array) -> None:
        floating = mx.issubdtype(value.dtype, mx.floating)
        nudged = self._nudged(value) if floating else value
        super().__setitem__(entry, nudged)  # type: ignore[no-untyped-call]


def evaluated(logits: mx.array) -> NDArray[np.float32]:
    stride = -(-logits.shape[-1] // MAX_COLUMNS)
    return np.array(logits[..., ::stride].astype(mx.float32))
