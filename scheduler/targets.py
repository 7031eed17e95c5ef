"""Latency targets of the server and of running sequences, and the time that they leave."""

from __future__ import annotations

from collections.abc import Iterable

from .latency_target import MIN_RUNNING, LatencyTarget
from .limits import Limits
from .resources import Admission, Resource
from .sequence_queues import SequenceQueues
from .step_cost import StepCost
from .types import Sequence, StepShape


class Targets(Resource):
    """The learned cost of steps, and the latency targets that they must meet.

    cost      learned cost of steps
    latency   combined target; None until a sequence or the server has one
    """

    def __init__(self, limits: Limits, queues: SequenceQueues) -> None:
        self.cost = StepCost(limits.row_tile)
        self.latency = None if limits.target_itl is None else LatencyTarget(limits.target_itl, self.cost)
        self._queues = queues
        self._has_targets = False  # whether a sequence had its own target

    def add(self, sequence: Sequence) -> None:
        """Take the target of a sequence into account, if it has one."""
        if sequence.latency.target_itl is not None:
            self._has_targets = True
            self.latency = self.latency or LatencyTarget(None, self.cost)

    def tightest(self, sequences: Iterable[Sequence]) -> float | None:
        """Return the tightest of these sequences' own targets."""
        if not self._has_targets:
            return None
        return min((own for each in sequences if (own := each.latency.target_itl) is not None), default=None)

    def may_admit(self, sequence: Sequence | None = None) -> bool:
        return self.has_time(sequence)

    def hold(self, sequence: Sequence) -> Admission:
        return Admission.ADMITTED if self.has_time(sequence) else Admission.STOP

    def has_time(self, sequence: Sequence | None = None) -> bool:
        """Whether the latency target leaves time for one more decoding sequence.

        The sequence may be given; otherwise one of average length counts. A few sequences may always run.
        """
        running = self._queues.running
        if self.latency is None or len(running) < MIN_RUNNING:
            return True
        num_rows = num_positions = 0
        for each in running if sequence is None else (*running, sequence):
            members = 1 + len(each.parallel_samples)
            num_rows += members
            num_positions += members * len(each.tokens)
        if sequence is None:
            num_positions += num_positions // num_rows
            num_rows += 1
        return self.latency.has_time_for(StepShape(num_rows, 0, num_positions, 0), self.tightest(running))
