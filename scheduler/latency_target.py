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
"""The error of a predicted step time that one step in ten exceeds, as a multiple of the mean absolute error.
For normally distributed errors this is 1.28 standard deviations, and one of these is 1.25 mean errors."""

FIRST_ERROR = 0.11
"""Assumed mean relative error of predictions before any was observed."""

MAX_HEADROOM = 0.95
MIN_HEADROOM = 0.7
"""Bounds of the share of the target that a predicted step may take. The upper bound keeps a reserve even
after steps with small errors; the lower bound lets prompts progress even if predictions are poor."""

_DECAY = 0.98

AUTO_FACTOR = 3.0
"""With the target ``auto``, a step may take this many times the time of its decodes alone, within the bounds
below."""

AUTO_MIN_S = 0.025
"""Seconds that ``auto`` always allows a step. Users do not notice such gaps, and small models need them for
whole chunks."""

AUTO_MAX_S = 0.2
"""Most seconds that ``auto`` allows a step, because a longer gap looks like a stall. ``AUTO_MIN_FACTOR`` can
raise it. A sequence is admitted only if all decodes together then fit into this time, or into
``AUTO_FACTOR`` times a one-sequence step."""

AUTO_MIN_FACTOR = 1.3
"""``auto`` always allows a step this many times the time of its decodes alone, so that prompts progress."""

DECODE_SHARE = 0.7
"""A sequence is admitted only if all decodes together then take at most this share of an explicit target. The
rest is for prompts, and for sequences to grow longer."""

MIN_RUNNING = 4
"""Number of sequences that may always run; fewer would use the machine poorly."""

MIN_CHUNK = 8
"""Prompt tokens that a step always takes, so that prompts progress even under a target that cannot be met."""

FIRST_CHUNK = 64
"""Prompt tokens per step until the first chunk has been timed."""


class LatencyTarget:
    """Limits the time of steps in which sequences decode."""

    def __init__(self, target_s: float | Literal["auto"] | None, cost: StepCost | None = None) -> None:
        """Begin without observations.

        target_s   seconds between two tokens of a sequence; "auto": derived from the time of decodes;
                   None: only targets of single sequences count
        """
        self.target_s = target_s
        self.cost = self._cost = cost or StepCost()
        self._num_chunks = 0
        self._error = FIRST_ERROR  # mean relative error of predictions

    @property
    def headroom(self) -> float:
        return max(MIN_HEADROOM, min(MAX_HEADROOM, 1 / (1 + LATE_FACTOR * self._error)))

    def limit(
        self, decodes: StepShape, tightest: float | None = None, spent_s: float = 0.0
    ) -> StepTime | None:
        """Return the time left for prompts next to these decodes; None if there is no target.

        spent_s    seconds of other work, such as encoding of images, since the last step
        """
        targets = [each for each in (self._target(decodes), tightest) if each is not None]
        if not decodes.num_decodes or not targets:
            return None
        limit_s = min(targets) * self.headroom - spent_s
        return StepTime(self._cost, decodes, limit_s, is_calibrated=self._num_chunks > 0)

    def _target(self, decodes: StepShape) -> float | None:
        if self.target_s != "auto":
            return self.target_s
        alone = self._cost.predict(decodes)
        return max(AUTO_MIN_S, min(AUTO_FACTOR * alone, max(AUTO_MAX_S, AUTO_MIN_FACTOR * alone)))

    def has_time_for(self, decodes: StepShape, tightest: float | None = None) -> bool:
        """Return whether a step with all these decodes leaves enough time for prompts."""
        one = self._cost.predict(StepShape(1, 0, decodes.num_positions // decodes.num_decodes, 0))
        most = max(AUTO_MAX_S, AUTO_FACTOR * one)
        limits = [
            most if target == "auto" or target * DECODE_SHARE < one else target * DECODE_SHARE
            for target in (self.target_s, tightest)
            if target is not None
        ]
        return self._cost.predict(decodes) <= min(limits, default=math.inf)

    def predict(self, shape: StepShape) -> float:
        return self._cost.predict(shape)

    def observe(self, shape: StepShape, seconds: float) -> None:
        if shape.num_chunk_tokens:
            predicted = self._cost.predict(shape) if self._num_chunks else 0.0
            if predicted > 0 and seconds > 0:
                error = min(1.0, abs(seconds / predicted - 1))
                self._error += (1 - _DECAY) * (error - self._error)
            self._num_chunks += 1
        self._cost.observe(shape, seconds)


class StepTime:
    def __init__(self, cost: StepCost, shape: StepShape, limit_s: float, *, is_calibrated: bool) -> None:
        self._cost = cost
        self._shape = shape
        self._limit_s = limit_s
        self._is_calibrated = is_calibrated

    @property
    def left_s(self) -> float:
        """Seconds left, below 0 if the target cannot be kept."""
        return self._limit_s - self._cost.predict(self._shape)

    def max_chunk(self, start: int, wanted: int) -> int:
        """Return the largest chunk at position ``start`` that fits the target, at most ``wanted`` tokens."""
        least = max(0, min(wanted, MIN_CHUNK - self._shape.num_chunk_tokens))
        if not self._is_calibrated:
            return min(wanted, max(least, FIRST_CHUNK - self._shape.num_chunk_tokens))
        low, high = least, wanted
        while low < high:
            middle = (low + high + 1) // 2
            if self._cost.predict(with_chunk(self._shape, start, middle)) <= self._limit_s:
                low = middle
            else:
                high = middle - 1
        return low

    def max_drafts(self, stop: int, wanted: int) -> int:
        """Return how many drafts of a sequence of ``stop`` tokens fit the target, at most ``wanted``."""
        most = 0
        while most < wanted:
            if self._cost.predict(with_drafts(self._shape, stop, most + 1)) > self._limit_s:
                break
            most += 1
        return most

    def spend_drafts(self, stop: int, num_drafts: int) -> None:
        self._shape = with_drafts(self._shape, stop, num_drafts)

    def spend(self, start: int, num_tokens: int) -> None:
        self._shape = with_chunk(self._shape, start, num_tokens)


class LatencyTargets(Resource):
    """A resource that admits sequences only while the latency targets leave time."""

    def __init__(self, limits: Limits, queues: SequenceQueues) -> None:
        self.cost = StepCost(limits.row_tile)
        self.latency = None if limits.target_itl is None else LatencyTarget(limits.target_itl, self.cost)
        self._queues = queues
        self._has_targets = False

    def add(self, sequence: Sequence) -> None:
        if sequence.latency.target_itl is not None:
            self._has_targets = True
            self.latency = self.latency or LatencyTarget(None, self.cost)

    def tightest(self, sequences: Iterable[Sequence]) -> float | None:
        """Return the shortest target of these sequences in seconds; None if they have no targets."""
        if not self._has_targets:
            return None
        return min((own for each in sequences if (own := each.latency.target_itl) is not None), default=None)

    def hold(self, sequence: Sequence) -> Admission:
        return Admission.ADMITTED if self.may_admit(sequence) else Admission.STOP

    def may_admit(self, sequence: Sequence | None = None) -> bool:
        """Return whether the latency target leaves time for one more decoding sequence.

        ``MIN_RUNNING`` sequences may always run.
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
