"""A Metal device that runs launches late, in any order that their inputs allow.

A launch returns arrays with garbage. It is run when the host waits for its results, or earlier at random.
Like MLX, the device sees dependencies only through array inputs."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_backend import Emulator, memory_of

_PLACEHOLDER = re.compile(r'"out(\d+)_\d+" ->')


@dataclass(eq=False)
class Job:
    """A launch that has not run; fills ``outputs``, after all launches in ``after``."""

    number: int
    name: str
    run: Callable[[], list[mx.array]]
    outputs: list[mx.array]
    after: set[int]


@dataclass
class LateDevice(Emulator):
    order_seed: int = 0
    order: list[int] = field(default_factory=list)
    launched: list[str] = field(default_factory=list)
    most_waiting: int = 0
    _waiting: dict[int, Job] = field(default_factory=dict)
    _running: bool = False

    def compile(self, **parts: Any) -> Callable[..., Sequence[mx.array]]:
        at_once = super().compile(**parts)

        def launch(**arguments: Any) -> list[mx.array]:
            outputs = [
                _garbage(shape, dtype)
                for shape, dtype in zip(arguments["output_shapes"], arguments["output_dtypes"], strict=True)
            ]
            number = len(self.launched)
            self.launched.append(parts["name"])
            after = self._ancestors(arguments["inputs"])
            job = Job(number, parts["name"], lambda: list(at_once(**arguments)), outputs, after)
            self._waiting[number] = job
            self.most_waiting = max(self.most_waiting, len(self._waiting))
            return outputs

        return launch

    def _ancestors(self, arrays: Sequence[mx.array]) -> set[int]:
        named = {
            f"out{number}_{i}": array
            for number, job in self._waiting.items()
            for i, array in enumerate(job.outputs)
        }
        graph = io.StringIO()
        mx.export_to_dot(graph, *(mx.stop_gradient(array) for array in arrays), **named)
        return {int(found) for found in _PLACEHOLDER.findall(graph.getvalue())} & set(self._waiting)

    def wait_for(self, arrays: Sequence[mx.array]) -> None:
        """Run launches until these arrays can be computed."""
        if self._running or not self._waiting:
            return
        self._running = True
        rng = random.Random(f"{self.order_seed} {len(self.order)}")
        needed = self._ancestors(arrays)
        while needed & set(self._waiting):
            ready = [job for job in self._waiting.values() if not job.after & set(self._waiting)]
            job = rng.choice(ready)
            for placeholder, made in zip(job.outputs, job.run(), strict=True):
                memory_of(placeholder)[...] = memory_of(made)
            del self._waiting[job.number]
            self.order.append(job.number)
        self._running = False

    @property
    def num_out_of_order(self) -> int:
        return sum(earlier > later for earlier, later in zip(self.order, self.order[1:], strict=False))

    @contextmanager
    def in_place_of_mlx(self) -> Iterator[None]:
        """Patch ``mx.eval`` to wait for launches, and ``mx.async_eval`` not to."""
        evaluate = mx.eval

        def waiting(*arrays: Any) -> None:
            self.wait_for(list(_leaves(arrays)))
            evaluate(*arrays)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mx, "eval", waiting)
            patch.setattr(mx, "async_eval", lambda *_: None)
            yield


def _garbage(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Return an array of invalid values: NaN, the largest integers, true."""
    array = mx.zeros(shape, dtype)
    memory_of(array)[...] = 1 if dtype == mx.bool_ else -1 & (2 ** (8 * dtype.size) - 1)
    return array


def _leaves(arrays: Any) -> Iterator[mx.array]:
    if isinstance(arrays, mx.array):
        yield arrays
    else:
        for each in arrays:
            yield from _leaves(each)


def read(array: mx.array) -> np.ndarray[Any, Any]:
    """Return a NumPy copy, after the device has computed it."""
    mx.eval(array)
    return np.array(array)
