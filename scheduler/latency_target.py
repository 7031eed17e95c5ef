"""Latency targets: limits for prefill chunks and admissions, so that decoding stays on time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from .limits import Limits
from .resources import Admission, Resource
from .sequence_queues import SequenceQueues
from .step_cost import StepCost, with_chunk, with_drafts
from .types import Sequence, StepShape

LATE_FACTOR = 1.6
"""Ratio of the error that one step in ten exceeds to the mean error, both of predicted times. Normal errors
are assumed: 1.28 standard deviations, each of 1.25 mean errors."""

FIRST_ERROR = 0.11
"""Assumed mean relative error of predictions before any was observed."""

MOST_HEADROOM = 0.95
LEAST_HEADROOM = 0.7
"""Bounds of the share of the target that a predicted step may take. The upper one keeps a reserve even after
a few calm steps; the lower one lets prompts progress even if predictions are poor."""

_FORGETTING = 0.98  # factor on older errors per step; about fifty steps with prompts count

AUTO_FACTOR = 3.0
"""``auto`` lets a step take this many times its decode-only time, within the bounds below."""

AUTO_LEAST_S = 0.025
"""Seconds that ``auto`` always allows: such gaps are too short to notice, and small models need whole
chunks."""

AUTO_MOST_S = 0.2
"""Most seconds that ``auto`` allows, because a longer gap looks like a stall; ``AUTO_ROOM`` can raise it.
Sequences are admitted only while a step of decodes fits into this time or ``AUTO_FACTOR`` times a
one-sequence step."""

AUTO_ROOM = 1.3
"""``auto`` always lets a step take this many times its decode-only time, so that prompts progress."""

DECODE_SHARE = 0.7
"""Share of an explicit target that decodes may take after another sequence is admitted. The rest is for
prompts and for positions that are yet to be generated."""

MIN_RUNNING = 4
"""Number of sequences that may always run; fewer would use the machine poorly."""

MIN_CHUNK = 8
"""Prompt tokens that a step always takes, so that prompts progress even under a target that cannot be met."""

UNTAUGHT_CHUNK = 64
"""Prompt tokens per step until the first chunk has been timed."""


class LatencyTarget:
    """The time that a step may take while sequences decode, and the errors of predictions so far."""

    def __init__(self, target_s: float | Literal["auto"] | None, cost: StepCost | None = None) -> None:
        """Begin with the learned ``cost`` of steps.

        ``target_s`` is the time between two tokens of a sequence; "auto" derives it from the time of decoding
        alone, and None leaves it to the sequences' own targets.
        """
        self.target_s = target_s
        self.cost = self._cost = cost or StepCost()
        self._num_chunks = 0  # observed steps that had prompt tokens
        self._error = FIRST_ERROR  # mean relative error of predictions

    @property
    def headroom(self) -> float:
        """Share of the target that a predicted step may take, so that 9 of 10 steps keep the target."""
        return max(LEAST_HEADROOM, min(MOST_HEADROOM, 1 / (1 + LATE_FACTOR * self._error)))

    def limit(self, decodes: StepShape, tightest: float | None = None) -> StepTime | None:
        """Return the time that prompts may take in a step with these decodes; None if there is no target.

        ``tightest``: the tightest of their own targets, in seconds.
        """
        targets = [each for each in (self._target(decodes), tightest) if each is not None]
        if not decodes.num_decodes or not targets:
            return None
        return StepTime(self._cost, decodes, min(targets) * self.headroom, taught=self._num_chunks > 0)

    def _target(self, decodes: StepShape) -> float | None:
        """Return the target time between two tokens of any sequence that decodes in this step, in seconds."""
        if self.target_s != "auto":
            return self.target_s
        alone = self._cost.predict(decodes)
        return max(AUTO_LEAST_S, min(AUTO_FACTOR * alone, max(AUTO_MOST_S, AUTO_ROOM * alone)))

    def has_time_for(self, decodes: StepShape, tightest: float | None = None) -> bool:
        """Whether this many sequences may run together.

        Their step without prompts must leave some time for prompts. A target that decoding alone would miss
        counts as "auto". ``tightest``: the tightest of their own targets, in seconds.
        """
        one = self._cost.predict(StepShape(1, 0, decodes.num_positions // decodes.num_decodes, 0))
        most = max(AUTO_MOST_S, AUTO_FACTOR * one)
        limits = [
            most if target == "auto" or target * DECODE_SHARE < one else target * DECODE_SHARE
            for target in (self.target_s, tightest)
            if target is not None
        ]
        return self._cost.predict(decodes) <= min(limits, default=math.inf)

    def predict(self, shape: StepShape) -> float:
        """Return the predicted seconds of a planned step."""
        return self._cost.predict(shape)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn the prediction error from a computed step."""
        if shape.num_chunk_tokens:
            predicted = self._cost.predict(shape) if self._num_chunks else 0.0
            if predicted > 0 and seconds > 0:
                error = min(1.0, abs(seconds / predicted - 1))  # limits the influence of a stalled step
                self._error += (1 - _FORGETTING) * (error - self._error)
            self._num_chunks += 1
        self._cost.observe(shape, seconds)


class StepTime:
    """The remaining time of a step while chunks are added to it."""

    def __init__(self, cost: StepCost, shape: StepShape, limit_s: float, *, taught: bool) -> None:
        self._cost = cost
        self._shape = shape
        self._limit_s = limit_s
        self._taught = taught

    def most(self, start: int, wanted: int) -> int:
        """Return for how many tokens of a prompt, from ``start`` on, there is time: at most ``wanted``."""
        least = max(0, min(wanted, MIN_CHUNK - self._shape.num_chunk_tokens))
        if not self._taught:
            return min(wanted, max(least, UNTAUGHT_CHUNK - self._shape.num_chunk_tokens))
        low, high = least, wanted
        while low < high:
            middle = (low + high + 1) // 2
            if self._cost.predict(with_chunk(self._shape, start, middle)) <= self._limit_s:
                low = middle
            else:
                high = middle - 1
        return low

    def most_drafts(self, stop: int, wanted: int) -> int:
        """Return for how many drafts of a sequence of ``stop`` tokens there is time: at most ``wanted``."""
        most = 0
        while most < wanted:
            if self._cost.predict(with_drafts(self._shape, stop, most + 1)) > self._limit_s:
                break
            most += 1
        return most

    def spend_drafts(self, stop: int, num_drafts: int) -> None:
        """Subtract the time of ``num_drafts`` drafts of a sequence of ``stop`` tokens."""
        self._shape = with_drafts(self._shape, stop, num_drafts)

    def spend(self, start: int, num_tokens: int) -> None:
        """Subtract the time of ``num_tokens`` of a prompt at ``start``."""
        self._shape = with_chunk(self._shape, start, num_tokens)


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
