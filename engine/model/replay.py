"""Replaying the graph of a step instead of running the model's Python code again.

Decode steps repeat: the same number of rows, other numbers in them. Model code that met such a
step twice is traced once, by ``mx.compile`` without any code generation: the arrays of the step and
the pages are inputs, and MLX clones the nodes between them and the logits. That costs a fraction of
building the graph in Python, and gives the same graph, so the same bits.

What the model takes from the step must reach it through arrays. Model code that asks for a
length as a number cannot be traced; the probe finds out, and such models run their code in every step.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

MAX_TRACES = 32  # shapes of steps whose graphs are kept
MAX_SEEN = 256  # shapes of steps that are remembered as seen once

Build = Callable[[Sequence[mx.array], bool], list[mx.array]]


@runtime_checkable
class ReplayablePool(Protocol):
    """A ``KVPool`` whose steps depend on arrays only, once their shapes are given."""

    def step_inputs(self) -> list[mx.array]:
        """What the step that has begun reads: its indices, flags and the pages of every layer."""
        ...

    def bind_inputs(self, arrays: Sequence[mx.array]) -> None:
        """Compute with these in their place."""
        ...

    def pending(self) -> list[mx.array]: ...

    def bind_pending(self, arrays: Sequence[mx.array]) -> None:
        """What a replayed graph gave in the place of ``pending()``."""
        ...

    def tracing(self, on: bool) -> None:
        """Let ``mx.compile`` trace and replay in this process, or not."""
        ...


class Replay:
    """Runs ``build(arrays, traced)``, which reads ``pools`` besides its arguments, or replays its graph."""

    def __init__(self, pools: Sequence[ReplayablePool]) -> None:
        self._pools = pools
        self._seen: OrderedDict[object, None] = OrderedDict()
        self._traces: OrderedDict[object, Any] = OrderedDict()
        self.num_replayed = 0

    def __call__(self, build: Build, arrays: Sequence[mx.array]) -> list[mx.array]:
        """The result of ``build``, by which graphs are told apart. Raises what tracing it raises; the
        pools are then as before."""
        inputs = [pool.step_inputs() for pool in self._pools]
        key = build, tuple(tuple(a.shape) for a in itertools.chain(arrays, *inputs))
        trace = self._traces.get(key)
        if trace is None:
            if key not in self._seen:
                _remember(self._seen, key, None, MAX_SEEN)
                return build(arrays, False)
            trace = mx.compile(self._tracer(build))
        with self._tracing(inputs):
            result, *pending = trace(list(arrays), inputs)
        for pool, written in zip(self._pools, pending, strict=True):
            pool.bind_pending(written)
        _remember(self._traces, key, trace, MAX_TRACES)
        self.num_replayed += 1
        outputs: list[mx.array] = result
        return outputs

    def _tracer(self, build: Build) -> Callable[..., list[Any]]:
        def trace(arrays: Sequence[mx.array], inputs: Sequence[Sequence[mx.array]]) -> list[Any]:
            self._bind(inputs)
            return [build(arrays, True), *(pool.pending() for pool in self._pools)]

        return trace

    def _bind(self, inputs: Sequence[Sequence[mx.array]]) -> None:
        for pool, arrays in zip(self._pools, inputs, strict=True):
            pool.bind_inputs(arrays)

    @contextmanager
    def _tracing(self, inputs: Sequence[Sequence[mx.array]]) -> Iterator[None]:
        self._pools[0].tracing(True)
        try:
            yield
        except BaseException:
            self._bind(inputs)
            raise
        finally:
            self._pools[0].tracing(False)


def _remember(kept: OrderedDict[object, Any], key: object, value: Any, limit: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > limit:
        kept.popitem(last=False)
