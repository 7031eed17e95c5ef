from __future__ import annotations

from collections import Counter
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from octavo.scheduler import Admission, Resource, SchedulerOutput, Sequence

from ..api.engine_info import AdapterInfo
from ..api.errors import InvalidRequest
from ..api.stats import AdapterLoad
from ..executor.base import Adapters
from .request import Request, Sample
from .step_parts import PartRows, StepPart

ROWS_INPUT = "adapters"


class AdapterPart(StepPart, Resource):
    """Tells every step which LoRA adapter each row uses."""

    def __init__(self, adapters: Adapters, max_loras: int) -> None:
        self._adapters = adapters
        self._max_loras = max_loras
        self._running: Counter[str] = Counter()
        self._names: WeakKeyDictionary[Sequence, str] = WeakKeyDictionary()
        self.samples: Counter[str] = Counter()

    def load(self, name: str, folder: Path, *, replace: bool = False) -> AdapterInfo:
        """Load an adapter. Raises InvalidRequest if requests use the old adapter of this name."""
        if replace:
            self._check_unused(name)
        return self._adapters.load(name, folder, replace=replace)

    def unload(self, name: str) -> None:
        self._adapters.info(name)
        self._check_unused(name)
        self._adapters.unload(name)

    def _check_unused(self, name: str) -> None:
        if count := self.samples[name]:
            raise InvalidRequest(
                f"adapter {name!r} must not be in use, got {count} unfinished samples that use it; try again "
                "when they have ended"
            )

    def usage(self) -> AdapterLoad:
        running = tuple(self._running)
        waiting = tuple(name for name, count in self.samples.items() if count > self._running.get(name, 0))
        return AdapterLoad(self._max_loras, running, waiting)

    @property
    def is_live(self) -> bool:
        return bool(self.samples)

    def begin(self, request: Request) -> None:
        if request.adapter is not None:
            self._names.update((sample.sequence, request.adapter) for sample in request.samples)
            self.samples[request.adapter] += len(request.samples)

    def end(self, sample: Sample) -> None:
        if (name := sample.request.adapter) is not None:
            self.samples[name] -= 1
            if not self.samples[name]:
                del self.samples[name]

    def rows(self, step: SchedulerOutput) -> PartRows | None:
        names = self._names.get
        slots = [
            0 if (name := names(item.sequence)) is None else self._adapters.slot(name) for item in step.work
        ]
        if not any(slots):
            return None
        counts = [item.end - item.start for item in step.work]
        return PartRows(inputs={ROWS_INPUT: np.repeat(np.array(slots, np.int32), counts).reshape(-1, 1, 1)})

    def hold(self, sequence: Sequence) -> Admission:
        return Admission.ADMITTED if self._held(self._names.get(sequence)) else Admission.NO_RESOURCE

    def fork(self, sequence: Sequence, sample: Sequence) -> bool:  # noqa: ARG002
        return self._held(self._names.get(sample))

    def _held(self, name: str | None) -> bool:
        if name is None:
            return True
        if not self._adapters.hold(name):
            return False
        self._running[name] += 1
        return True

    def release(self, sequence: Sequence) -> None:
        if (name := self._names.get(sequence)) is not None:
            self._adapters.release(name)
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]
