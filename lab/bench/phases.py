from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

from octavo.engine.core.engine_core import EngineCore
from octavo.kernels.backends import kernel_clock


@dataclass(frozen=True, slots=True)
class StepParts:
    """Mean milliseconds of each part of a step.

    kernels   None if the backend does not time kernels
    run       time of the model runner outside of kernels
    """

    kernels: float | None
    plan: float
    batch: float
    run: float
    accept: float
    commit: float
    report: float

    @property
    def overhead(self) -> float | None:
        if self.kernels is None:
            return None
        return self.plan + self.batch + self.run + self.accept + self.commit + self.report

    def as_dict(self) -> dict[str, float | None]:
        parts = {name: getattr(self, name) for name in StepParts.__slots__}
        return {**parts, "overhead": self.overhead}


class Phases:
    """Context manager that adds up the time of each part of an engine core's steps."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._kernel_seconds = kernel_clock(core.info.backend)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._last = self._kernels = 0.0

    def __enter__(self) -> Phases:
        self._kernels = self._kernel_seconds() if self._kernel_seconds else 0.0
        self._core.passed = self._passed
        self._last = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._core.passed = lambda _: None
        if self._kernel_seconds:
            self._kernels = self._kernel_seconds() - self._kernels

    def _passed(self, part: str) -> None:
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def parts(self, num_steps: int) -> StepParts:
        ms = {
            name: 1e3 * self._seconds[name] / num_steps for name in StepParts.__slots__ if name != "kernels"
        }
        if self._kernel_seconds is None:
            return StepParts(kernels=None, **ms)
        kernels = 1e3 * self._kernels / num_steps
        return StepParts(kernels=kernels, **ms | {"run": ms["run"] - kernels})
