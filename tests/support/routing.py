"""Comparison of mixtures of experts with equal routing.

Rounding may choose another expert, which changes all later results. So the reference takes the served
model's experts, and reports how far they are from the experts that it would choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx_lm.models.switch_layers import SwitchGLU
from numpy.typing import NDArray

from octavo.engine.executor.base import ModelRunner
from octavo.engine.executor.batch import Batch
from octavo.engine.executor.model_runner import PagedRunner

Prefix = tuple[int, ...]


class _ObservedExperts(SwitchGLU):
    seen: Callable[[mx.array], None]

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self.seen(indices)
        return super().__call__(x, indices)


class _WideExperts(SwitchGLU):
    """Experts in float32 with rounded results, because MLX supports no other type on a CPU."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        return super().__call__(x.astype(mx.float32), indices).astype(x.dtype)


class _ForcedRouter(Linear):
    choose: Callable[[mx.array], mx.array]

    def __call__(self, x: mx.array) -> mx.array:
        return self.choose(super().__call__(x))


@dataclass(slots=True)
class Routing:
    chosen: dict[Prefix, list[frozenset[int]]] = field(default_factory=dict)
    _step: list[mx.array] = field(default_factory=list)

    def observe(self, runner: ModelRunner) -> None:
        """Observe the runner's model, which runs its Python code instead of a recording."""
        assert isinstance(runner, PagedRunner)
        runner._model.graph_runner = None
        for _, experts in mixtures(served_model(runner)):
            experts.__class__ = _ObservedExperts
            experts.seen = self._step.append

    def end_step(self, batch: Batch, tokens: Sequence[list[int]]) -> None:
        layers = [np.array(indices).reshape(len(batch.token_ids), -1) for indices in self._step]
        self._step.clear()
        starts = batch.attention.q_start
        for own, first, stop in zip(tokens, starts[:-1], starts[1:], strict=True):
            for row in range(first, stop):
                prefix = tuple(own[: batch.attention.positions[row] + 1])
                choice = [frozenset(layer[row].tolist()) for layer in layers]
                assert self.chosen.setdefault(prefix, choice) == choice, f"{prefix} was routed twice"


class RoutedModel:
    """An mlx-lm model with mixtures that take the experts in ``routing``.

    logits: [L, E] of each router in the last forward"""

    def __init__(self, model: Module, routing: Routing, *, wide: bool) -> None:
        self.logits: list[NDArray[np.float64]] = []
        self._model = model
        self._routing = routing
        self._tokens: list[int] = []
        for number, (router, experts) in enumerate(mixtures(model)):
            router.__class__ = _ForcedRouter
            router.choose = self._chooser(number)
            if not wide:
                experts.__class__ = _WideExperts
                experts.set_dtype(mx.float32)

    def __call__(self, tokens: list[int], cache: Any) -> mx.array:
        """Return logits [L, V] of one sequence."""
        self.logits.clear()
        self._tokens = tokens
        result: mx.array = self._model(mx.array([tokens]), cache=cache)[0]
        return result

    def distances(self) -> NDArray[np.float64]:
        """Return router logits of the best unused expert minus the worst used one, [num_mixtures, L].

        Negative where the model would have chosen the same experts."""
        return np.stack([self._distance(number, rows) for number, rows in enumerate(self.logits)])

    def _distance(self, number: int, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        taken = self._taken(number, rows.shape)
        worst_taken = np.where(taken, rows, np.inf).min(-1)
        result: NDArray[np.float64] = np.where(taken, -np.inf, rows).max(-1) - worst_taken
        return result

    def _chooser(self, number: int) -> Callable[[mx.array], mx.array]:
        def choose(logits: mx.array) -> mx.array:
            rows = np.array(logits[0].astype(mx.float32), np.float64)
            self.logits.append(rows)
            taken = mx.array(self._taken(number, rows.shape))[None]
            return mx.where(taken, logits, mx.array(-mx.inf, logits.dtype))

        return choose

    def _taken(self, number: int, shape: tuple[int, ...]) -> NDArray[np.bool_]:
        taken = np.zeros(shape, np.bool_)
        for position, row in enumerate(taken):
            row[list(self._routing.chosen[tuple(self._tokens[: position + 1])][number])] = True
        return taken


def served_model(runner: ModelRunner) -> Module:
    assert isinstance(runner, PagedRunner)
    return runner._model._model


def mixtures(model: Module) -> Iterator[tuple[Any, Any]]:
    """Return router and experts of each mixture, in layer order."""
    for _, block in sorted(model.named_modules(), key=lambda named: _layer_of(named[0])):
        for experts in (child for child in block.children().values() if isinstance(child, SwitchGLU)):
            yield getattr(block, "router", None) or block.gate, experts


def _layer_of(name: str) -> int:
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)
