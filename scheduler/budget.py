from __future__ import annotations

from collections.abc import Iterable

from octavo.block_manager import BlockManager

from .latency_target import StepTime
from .limits import Limits
from .resources import Resource
from .types import Sequence
from .waiting import cached_tokens


class TokenBudget:
    """The tokens left in a step.

    A prompt is long while more than ``Limits.max_step_tokens`` of its tokens are still to be computed. While
    shorter prompts wait, long prompts together get half of the tokens.
    """

    def __init__(
        self,
        left: int,
        limits: Limits,
        blocks: BlockManager,
        resources: Resource,
        *,
        time: StepTime | None = None,
    ) -> None:
        self.left = left
        self._time = time
        self._threshold = limits.max_step_tokens
        self._blocks = blocks
        self._resources = resources
        self._left_for_long: int | None = None
        self._may_hash = True

    @property
    def is_long_share_spent(self) -> bool:
        """Whether long prompts have used up their tokens of this step."""
        return self._left_for_long is not None and self._left_for_long <= 0

    def is_long(self, sequence: Sequence) -> bool:
        return self.num_missing(sequence) > self._threshold

    def num_missing(self, sequence: Sequence) -> int:
        """Return how many tokens a sequence must still compute.

        For a waiting sequence this may be too many, because its cached tokens may not be known yet.
        """
        if sequence.table is not None:
            return sequence.backlog
        num_tokens = len(sequence.tokens)
        if num_tokens <= self._threshold or sequence.skip_prefix_cache or not self._blocks.prefix_cache:
            return num_tokens
        if not sequence.digests:
            if not self._may_hash:
                return num_tokens
            self._may_hash = False
        return num_tokens - cached_tokens(sequence, self._blocks)

    def grant(
        self,
        sequence: Sequence,
        wanted: int,
        competing: Iterable[Sequence],
        first: Iterable[Sequence] = (),
    ) -> int:
        """Return how many of the ``wanted`` tokens a sequence may compute now.

        An image whose rows attend to each other may get more than is left, because one step must compute it.
        """
        granted = min(wanted, self.left - self._demand(first))
        if wanted > self._threshold:
            if self._left_for_long is None:
                self._left_for_long = max(1, self.left - self._short_demand(sequence.priority, competing))
            granted = min(granted, self._left_for_long)
        if self._time is not None:
            in_time = self._time.max_chunk(len(sequence.tokens) - wanted, granted)
            if in_time < granted:
                self.left = in_time
            granted = in_time
        if sequence.media:
            start = len(sequence.tokens) - wanted
            num_ready = self._resources.num_ready(sequence)
            granted = _without_cuts(sequence, start, min(granted, num_ready - start))
        return granted

    def spend(self, sequence: Sequence, num_tokens: int, wanted: int) -> None:
        self.left = max(0, self.left - num_tokens)
        if self._time is not None:
            self._time.spend(len(sequence.tokens) - wanted, num_tokens)
        if wanted > self._threshold and self._left_for_long is not None:
            self._left_for_long -= num_tokens

    def _demand(self, sequences: Iterable[Sequence]) -> int:
        demand = 0
        for sequence in sequences:
            demand += self.num_missing(sequence)
            if demand >= self.left:
                return self.left
        return demand

    def grant_drafts(self, sequence: Sequence, wanted: int) -> int:
        """Return how many of the ``wanted`` draft tokens of a decoding sequence fit into the step."""
        granted = max(0, min(wanted, self.left))
        if self._time is not None:
            granted = self._time.max_drafts(len(sequence.tokens), granted)
        return granted

    def spend_drafts(self, sequence: Sequence, num_drafts: int) -> None:
        self.left -= num_drafts
        if self._time is not None:
            self._time.spend_drafts(len(sequence.tokens), num_drafts)

    def _short_demand(self, priority: int, competing: Iterable[Sequence]) -> int:
        demand, most = 0, self.left // 2
        for sequence in competing:
            missing = self.num_missing(sequence)
            if sequence.priority <= priority and missing <= self._threshold:
                demand += missing
                if demand >= most:
                    return most
        return demand


def _without_cuts(sequence: Sequence, start: int, granted: int) -> int:
    for span in sequence.media:
        if granted and span.is_bidirectional and span.start < start + granted < span.stop:
            return (span.start if span.start > start else span.stop) - start
    return granted
