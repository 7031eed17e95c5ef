"""The tokens of one step, shared between long prompts and short ones."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.block_manager import BlockManager

from .latency_target import StepTime
from .limits import Limits
from .types import Sequence
from .waiting import cached_tokens


class TokenBudget:
    """What is left of a step's tokens, and how much of it long prompts may take.

    A prompt is long while more of it has to be computed than ``Limits.max_step_tokens``. While
    shorter ones wait, long ones together take half of the tokens, or what the shorter ones leave. Under
    a latency target, ``time`` is what the step may take.

    left   tokens that nobody has been given yet
    """

    def __init__(
        self, left: int, limits: Limits, blocks: BlockManager, *, time: StepTime | None = None
    ) -> None:
        self.left = left
        self._time = time
        self._threshold = limits.max_step_tokens
        self._blocks = blocks
        self._left_for_long: int | None = None  # unknown before there is a long prompt
        self._may_hash = True

    @property
    def long_ones_have_theirs(self) -> bool:
        """Whether another long prompt would get nothing."""
        return self._left_for_long is not None and self._left_for_long <= 0

    def is_long(self, sequence: Sequence) -> bool:
        return self.num_missing(sequence) > self._threshold

    def num_missing(self, sequence: Sequence) -> int:
        """Tokens of a sequence that are to be computed; of a short prompt that waits, all of them at most.

        One prompt a step is hashed for it: what is cached of a later one shows in a later step."""
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
        rivals: Iterable[Sequence],
        first: Iterable[Sequence] = (),
    ) -> int:
        """Tokens that a sequence may compute now, of the ``wanted`` ones.

        rivals   those that have not got their tokens yet; looked at if this is the first long prompt
        first    those that take what they need before this one
        """
        granted = min(wanted, self.left - self._demand(first))
        if wanted > self._threshold:
            if self._left_for_long is None:
                self._left_for_long = max(1, self.left - self._short_demand(sequence.priority, rivals))
            granted = min(granted, self._left_for_long)
        if self._time is not None:
            in_time = self._time.most(len(sequence.tokens) - wanted, granted)
            if in_time < granted:
                self.left = in_time  # there is no time for anything else
            granted = in_time
        return granted

    def spend(self, sequence: Sequence, num_tokens: int, wanted: int) -> None:
        """``num_tokens`` of a sequence's ``wanted`` ones are in the step."""
        self.left = max(0, self.left - num_tokens)
        if self._time is not None:
            self._time.spend(len(sequence.tokens) - wanted, num_tokens)
        if wanted > self._threshold and self._left_for_long is not None:
            self._left_for_long -= num_tokens

    def _demand(self, sequences: Iterable[Sequence]) -> int:
        """What these could use, all that is left at most."""
        demand = 0
        for sequence in sequences:
            demand += self.num_missing(sequence)
            if demand >= self.left:
                return self.left
        return demand

    def grant_drafts(self, sequence: Sequence, wanted: int) -> int:
        """Drafts of a decoding sequence that the step has room for, of the ``wanted`` ones."""
        granted = max(0, min(wanted, self.left))
        if self._time is not None:
            granted = self._time.most_drafts(len(sequence.tokens), granted)
        return granted

    def spend_drafts(self, sequence: Sequence, num_drafts: int) -> None:
        """So many drafts of a sequence are in the step."""
        self.left -= num_drafts
        if self._time is not None:
            self._time.spend_drafts(len(sequence.tokens), num_drafts)

    def _short_demand(self, priority: int, rivals: Iterable[Sequence]) -> int:
        """What short prompts that are no less urgent could use, half of what is left at most."""
        demand, most = 0, self.left // 2
        for sequence in rivals:
            missing = self.num_missing(sequence)
            if sequence.priority <= priority and missing <= self._threshold:
                demand += missing
                if demand >= most:
                    return most
        return demand
