"""The interface of step parts: optional features, such as adapters or prompt scores, that add to steps.

The core knows no feature by name. It reports every request to every part. Apart from that, it calls only the
parts that some request needs now. A part may ask for results of a step's rows, which the core delivers to the
part. Parts are called in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
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
    """What one part adds to a step.

    scored   prompt tokens whose probability the part needs
    hidden   [P] rows whose hidden states the part needs, ascending
    inputs   named inputs of all rows, see ``Batch.inputs``
    last     for each row of the step, the last position that the row attends to, see ``StepRows``
    """

    scored: ScoredRows | None = None
    hidden: Ints | None = None
    inputs: Mapping[str, RowInput] = NO_INPUTS
    last: Ints | None = None


class PartResults(NamedTuple):
    """The results of the rows that one part asked for, in the order of the rows."""

    scores: tuple[TokenLogprob, ...] = ()
    hidden: States | None = None


class StepPart:
    """A feature that some requests use. Between ``rows`` and ``deliver`` a part remembers the requests of its
    rows. So a step with results for a part is resolved before the next step is submitted."""

    @property
    def is_live(self) -> bool:
        """Whether some request needs the part; if not, only ``begin`` and ``end`` are called."""
        return False

    def begin(self, request: Request) -> None:
        """Called when a request was queued."""

    def held(self) -> Set[Served]:
        """Return sequences that the next step leaves out, because they wait for this part."""
        return frozenset()

    def rows(self, step: SchedulerOutput) -> PartRows | None:  # noqa: ARG002
        """Return the part's additions to a planned step; None for nothing."""
        return None

    def deliver(self, results: PartResults) -> None:
        """Called with the results of the rows that ``rows`` returned last."""

    def may_overlap(self, going_on: Sequence[Sample]) -> bool:  # noqa: ARG002
        """Whether the next step may be submitted before the one in flight gives a token to these samples."""
        return True

    def prepare(self, going_on: Sequence[Sample]) -> None:
        """Called after a step was committed, to prepare for the next tokens of these samples."""

    def end(self, sample: Sample) -> None:
        """Called when a sample has ended."""

    def close(self) -> None:
        """Free all resources; no step follows."""


class AskedRows(NamedTuple):
    """The additions of all parts to one step."""

    parts: tuple[tuple[StepPart, PartRows], ...]

    @property
    def expects_results(self) -> bool:
        return any(rows.scored is not None or rows.hidden is not None for _, rows in self.parts)

    @property
    def hidden(self) -> Ints | None:
        """Rows whose hidden states are needed, ascending and without repeats; None for no rows."""
        wanted = [rows.hidden for _, rows in self.parts if rows.hidden is not None]
        if len(wanted) > 1:
            return np.unique(np.concatenate(wanted))
        return wanted[0] if wanted else None

    def added_to(self, batch: Batch) -> Batch:
        """Return the batch with all parts' rows."""
        scored = [rows.scored for _, rows in self.parts if rows.scored is not None]
        assert len(scored) < 2, "one part scores prompts"
        inputs: dict[str, RowInput] = {}
        for _, rows in self.parts:
            assert not inputs.keys() & rows.inputs.keys(), "two parts give an input of one name"
            inputs.update(rows.inputs)
            if rows.last is not None:
                batch = batch._replace(attention=replace(batch.attention, last=rows.last))
        return batch._replace(scored=scored[0] if scored else None, hidden=self.hidden, inputs=inputs)

    def deliver(self, output: RunOutput) -> None:
        """Give every part the results of its own rows."""
        every = self.hidden
        for part, rows in self.parts:
            hidden = None
            if every is not None and rows.hidden is not None and output.hidden is not None:
                hidden = output.hidden[np.searchsorted(every, rows.hidden)]
            if rows.scored is not None or hidden is not None:
                part.deliver(PartResults(() if rows.scored is None else output.scores, hidden))


NOTHING_ASKED = AskedRows(())
NONE_HELD: Set[Served] = frozenset()


class StepParts:
    """The parts of one core."""

    def __init__(self, parts: Iterable[StepPart]) -> None:
        self._parts = tuple(parts)
        self.live: list[
            StepPart
        ] = []  # parts that were live after the last ``begin``, ``end`` or ``prepare``

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

    def held(self) -> Set[Served]:
        """Return the sequences that are left out of the next step."""
        return frozenset().union(*(part.held() for part in self.live))

    def ask(self, step: SchedulerOutput) -> AskedRows:
        """Collect the live parts' rows of a step."""
        asked = [(part, rows) for part in self.live if (rows := part.rows(step)) is not None]
        return AskedRows(tuple(asked)) if asked else NOTHING_ASKED

    def prepare(self, going_on: Sequence[Sample]) -> None:
        """Let the live parts prepare for these samples' next tokens."""
        for part in self.live:
            part.prepare(going_on)
        self._find_live()
