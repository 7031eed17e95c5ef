from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.kernels.metadata import Ints
from octavo.scheduler import SchedulerOutput
from octavo.scheduler import Sequence as Served

from ..api.outputs import TokenLogprob
from ..executor.base import RunOutput
from ..executor.batch import NO_INPUTS, Batch, RowInput, ScoredRows
from .request import Request, Sample

States = npt.NDArray[np.float32]


class PartRows(NamedTuple):
    """Rows and inputs that one part adds to a step.

    hidden   [P] ascending rows for which the part needs hidden states
    last     [T] last position that each row attends to
    """

    scored: ScoredRows | None = None
    hidden: Ints | None = None
    inputs: Mapping[str, RowInput] = NO_INPUTS
    last: Ints | None = None


class PartResults(NamedTuple):
    scores: tuple[TokenLogprob, ...] = ()
    hidden: States | None = None


class StepPart:
    """Optional feature of a step, such as adapters or prompt scores."""

    @property
    def is_live(self) -> bool:
        return False

    def begin(self, request: Request) -> None:
        """Called when a request was queued."""

    def work(self, time_left: Callable[[], float | None]) -> list[Served] | None:  # noqa: ARG002
        """Do work between two steps; return sequences to try again. Returns None if there was no work."""
        return None

    def paused(self) -> Set[Served]:
        return frozenset()

    def rows(self, step: SchedulerOutput) -> PartRows | None:  # noqa: ARG002
        """Return the rows and inputs that the part adds to a step, if any."""
        return None

    def deliver(self, results: PartResults) -> None:
        """Called with the results of the rows that ``rows`` returned last."""

    def may_overlap(self, unfinished: Sequence[Sample]) -> bool:  # noqa: ARG002
        """Whether the next step may be submitted before these samples get their token."""
        return True

    def prepare(self, unfinished: Sequence[Sample]) -> None:
        """Called after a step, to prepare the next token of these samples."""

    def end(self, sample: Sample) -> None: ...

    def close(self) -> None: ...


class RequestedRows(NamedTuple):
    parts: tuple[tuple[StepPart, PartRows], ...]

    @property
    def expects_results(self) -> bool:
        return any(rows.scored is not None or rows.hidden is not None for _, rows in self.parts)

    @property
    def hidden(self) -> Ints | None:
        wanted = [rows.hidden for _, rows in self.parts if rows.hidden is not None]
        if len(wanted) > 1:
            return np.unique(np.concatenate(wanted))
        return wanted[0] if wanted else None

    def added_to(self, batch: Batch) -> Batch:
        scored = [rows.scored for _, rows in self.parts if rows.scored is not None]
        assert len(scored) < 2, "one part scores prompts"
        inputs: dict[str, RowInput] = {}
        for _, rows in self.parts:
            assert not inputs.keys() & rows.inputs.keys(), "two parts give inputs of the same name"
            inputs.update(rows.inputs)
            if rows.last is not None:
                batch = batch._replace(attention=replace(batch.attention, last=rows.last))
        return batch._replace(scored=scored[0] if scored else None, hidden=self.hidden, inputs=inputs)

    def deliver(self, output: RunOutput) -> None:
        every = self.hidden
        for part, rows in self.parts:
            hidden = None
            if every is not None and rows.hidden is not None and output.hidden is not None:
                hidden = output.hidden[np.searchsorted(every, rows.hidden)]
            if rows.scored is not None or hidden is not None:
                part.deliver(PartResults(() if rows.scored is None else output.scores, hidden))


NO_ROWS_REQUESTED = RequestedRows(())
NONE_PAUSED: Set[Served] = frozenset()


class StepParts:
    def __init__(self, parts: Iterable[StepPart]) -> None:
        self._parts = tuple(parts)
        self.live: list[StepPart] = []

    def begin(self, request: Request) -> None:
        for part in self._parts:
            part.begin(request)
        self._find_live()

    def end(self, sample: Sample) -> None:
        for part in self._parts:
            part.end(sample)
        self._find_live()

    def _find_live(self) -> None:
        self.live = [part for part in self._parts if part.is_live]

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def work(self, time_left: Callable[[], float | None]) -> list[Served] | None:
        done = [ready for part in self.live if (ready := part.work(time_left)) is not None]
        return [sequence for ready in done for sequence in ready] if done else None

    def paused(self) -> Set[Served]:
        return frozenset().union(*(part.paused() for part in self.live))

    def request_rows(self, step: SchedulerOutput) -> RequestedRows:
        requested = [(part, rows) for part in self.live if (rows := part.rows(step)) is not None]
        return RequestedRows(tuple(requested)) if requested else NO_ROWS_REQUESTED

    def prepare(self, unfinished: Sequence[Sample]) -> None:
        for part in self.live:
            part.prepare(unfinished)
        self._find_live()
