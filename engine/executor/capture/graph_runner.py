"""Capture of a step's graph, to replay it instead of running the model's Python code again.

The first step of a shape becomes a program (``CapturedStep``): a list of kernels with the addresses
that they read and write. A later step runs only the kernels, with bit-identical results. All values of
a step must reach the model through arrays. Models that read a value in Python are not captured.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx

from octavo.kernels import _ext
from octavo.kernels.metadata import Ints
from octavo.kernels.replay import ReplayablePool

from ..overrides import replaced

log = logging.getLogger(__name__)

MAX_CAPTURED = 128

VALUE_READERS = ("tolist", "item", "__bool__", "__int__", "__float__")

Build = Callable[[Sequence[mx.array], bool], list[mx.array]]


class GraphRunner:
    def __init__(self, pools: Sequence[ReplayablePool]) -> None:
        self._pools = pools
        self.strict = False
        self._captured: OrderedDict[object, CapturedStep | EagerStep] = OrderedDict()
        self._last: CapturedStep | EagerStep | None = None
        self._arena = _ext.Arena()  # memory of all programs, of which one runs at a time
        self.is_computed = False
        self.num_replayed = 0

    def __call__(self, build: Build, values: Sequence[Ints]) -> list[mx.array]:
        host, shapes = list(values), [value.shape for value in values]
        for pool in self._pools:
            host += pool.packed_values()
            shapes.append(pool.step_shape)
        key = build, *shapes
        step = self._captured.get(key) or self._capture(build, values)
        outputs = step.run(host)
        if step is not self._last:
            self._remember(key, step)
        self.is_computed = isinstance(step, CapturedStep)
        self.num_replayed += self.is_computed
        return outputs

    def _capture(self, build: Build, values: Sequence[Ints]) -> CapturedStep | EagerStep:
        try:
            return CapturedStep(self._pools, self._arena, build, values)
        except CannotCapture as error:
            if self.strict:
                raise
            log.warning("steps like this one cannot replay a graph, so each builds a new one: %s", error)
            return EagerStep(build, len(values))

    def _remember(self, key: object, step: CapturedStep | EagerStep) -> None:
        self._captured[key] = self._last = step
        self._captured.move_to_end(key)
        if len(self._captured) > MAX_CAPTURED:
            self._captured.popitem(last=False)


class CannotCapture(Exception):
    """A graph has operations that cannot be captured."""


def values_unread() -> AbstractContextManager[None]:
    capturing = threading.get_ident()

    def refuse(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def read(*args: object, **options: object) -> object:
            if threading.get_ident() == capturing:
                raise CannotCapture(f"the model reads values while a graph is built ({name})")
            return original(*args, **options)

        return read

    readers: list[tuple[Any, str]] = [(mx.array, name) for name in VALUE_READERS]
    readers += [(mx, "eval"), (mx, "async_eval")]
    return replaced(*((owner, name, functools.partial(refuse, name)) for owner, name in readers))


class CapturedStep:
    def __init__(
        self, pools: Sequence[ReplayablePool], arena: _ext.Arena, build: Build, values: Sequence[Ints]
    ) -> None:
        inputs = [pool.step_inputs() for pool in pools]
        counts = [len(pool.step_values()) for pool in pools]
        arrays = [mx.array(value) for value in values]
        own = [
            [*map(mx.array, pool.step_values()), *before[count:]]
            for pool, before, count in zip(pools, inputs, counts, strict=True)
        ]
        filled = [
            *arrays,
            *(array for mine, count in zip(own, counts, strict=True) for array in mine[:count]),
        ]
        fixed = [array for mine, count in zip(own, counts, strict=True) for array in mine[count:]]
        try:
            _bind(pools, own)
            with values_unread():
                outputs = build(arrays, True)
            pending = [pool.pending() for pool in pools]
            made = [*(array for written in pending for array in written), *outputs]
            self._program = _ext.Program(arena, filled, fixed, made)
        except ValueError as error:
            raise CannotCapture(str(error)) from None
        finally:
            _bind(pools, inputs)
        results = iter(self._program.outputs)
        self._pending = [
            (pool, [next(results) for _ in written]) for pool, written in zip(pools, pending, strict=True)
        ]
        self._outputs = [next(results) for _ in outputs]

    def run(self, host: Sequence[Ints]) -> list[mx.array]:
        self._program.run(host)
        for pool, written in self._pending:
            pool.bind_pending(written)
        return self._outputs


class EagerStep:
    def __init__(self, build: Build, num_values: int) -> None:
        self._build = build
        self._num_values = num_values

    def run(self, host: Sequence[Ints]) -> list[mx.array]:
        return self._build([mx.array(value) for value in host[: self._num_values]], False)


def _bind(pools: Sequence[ReplayablePool], inputs: Sequence[Sequence[mx.array]]) -> None:
    for pool, arrays in zip(pools, inputs, strict=True):
        pool.bind_inputs(arrays)
