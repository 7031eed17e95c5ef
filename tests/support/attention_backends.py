from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from octavo.kernels.backends import choose_backend
from octavo.kernels.interface import AttentionBackend, PageStorage
from octavo.kernels.reference.backend import ReferenceBackend, ReferencePool


@dataclass(frozen=True, slots=True)
class TestedBackend:
    __test__ = False
    name: str
    tolerance: float

    def create(self) -> AttentionBackend:
        """Return the backend, or skip the test if the machine lacks it."""
        if self.name == "reference":
            return ReferenceBackend()
        try:
            return choose_backend("cpu", threads=2).backend
        except ValueError as error:
            pytest.skip(str(error))


# The reference computes in float32. Native kernels round queries and softmax weights to bf16 (2^-9 each), and
# these errors add up.
BACKENDS = (TestedBackend("reference", 2e-5), TestedBackend("cpu", 2e-2))


def poison(pool: PageStorage) -> None:
    """Set every byte of the pool to 0xFF: NaN as bf16, as fp16, and as the scale of a 4-bit row."""
    if isinstance(pool, ReferencePool):
        for layer in pool._parts:
            for part in layer:
                part[:] = [_filled(array) for array in part]
        mx.eval(pool._parts)
    else:
        pool._layers[:] = [_filled(array) for array in pool._layers]  # type: ignore[attr-defined]
        mx.eval(pool._layers)  # type: ignore[attr-defined]


def _filled(array: mx.array) -> mx.array:
    raw = np.full(array.shape, -1, f"i{array.dtype.size}")
    return mx.array(raw).view(array.dtype)


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> str:
    chosen: TestedBackend = request.param
    chosen.create()
    return chosen.name
