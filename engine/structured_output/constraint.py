"""Where one sample stands in its grammar."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .mask_budget import MaskBudget
from .mask_threads import MaskFailed, MaskJob, MaskThreads, SharedLexer

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = NDArray[np.bool_]


TOO_COSTLY = "another output under it is too costly to follow"


class ConstraintFailed(Exception):
    """The grammar got too costly to follow, or was not followed; the message is for the caller."""


class Constraint:
    """Which tokens may come next. Follows the tokens of one sample: ``accept`` each one in turn.

    Lives as long as the sample: preemption recomputes K/V and leaves it alone. A copy is
    independent of the original. What it costs is charged to its request's budget.
    """

    __slots__ = (
        "_bits",
        "_budget",
        "_end_ids",
        "_is_lost",
        "_job",
        "_kind",
        "_lexer",
        "_matcher",
        "_threads",
        "_vocab_size",
    )

    def __init__(
        self,
        matcher: LLMatcher,
        kind: str,
        *,
        first_mask: bytes | None,
        threads: MaskThreads,
        vocab_size: int,
        end_ids: NDArray[np.intp],
        budget: MaskBudget | None = None,
        lexer: SharedLexer | None = None,
    ) -> None:
        """``first_mask``: bits of the tokens that may come first, if they are known. ``end_ids``: tokens
        that end an output where the grammar lets it end."""
        self._matcher = matcher
        self._kind = kind
        self._bits = first_mask
        self._job: MaskJob | None = None  # that computes them
        self._threads = threads
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._budget = budget or MaskBudget()
        self._is_lost = False  # a token could not be accepted
        self._lexer = lexer or SharedLexer()

    def copy(self) -> Constraint:
        """One with a budget of its own. Not while ``prepare`` is at work."""
        [copy] = self.copies(1)
        return copy

    def copies(self, num_samples: int) -> list[Constraint]:
        """As many, for the samples of one request, which share a budget."""
        budget = MaskBudget(num_samples)
        return [
            Constraint(
                self._matcher.deep_copy(),
                self._kind,
                first_mask=self._bits,
                threads=self._threads,
                vocab_size=self._vocab_size,
                end_ids=self._end_ids,
                budget=budget,
                lexer=self._lexer,
            )
            for _ in range(num_samples)
        ]

    @property
    def is_stuck(self) -> bool:
        """Whether another copy's mask takes so long that nobody waits for it any more."""
        return self._lexer.num_stuck > 0

    @property
    def is_complete(self) -> bool:
        """Whether the output is whole and nothing may follow but its end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def prepare(self) -> None:
        """Begin to find out what may come next, on another thread."""
        if self._bits is None and self._job is None:
            self._job = MaskJob(self._matcher, self._budget, self._lexer)
            self._threads.submit(self._job)

    def allowed(self, *, may_end: bool = True) -> Mask:
        """[V] tokens that may come next, never none of them. Without ``may_end`` the end tokens
        are not among them, unless nothing else may follow. Waits for ``prepare``, but not for ever.
        ConstraintFailed if nobody can say, or if it costs too much."""
        bits = np.frombuffer(self._next_bits(), np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not may_end:
            ends = mask[self._end_ids]
            mask[self._end_ids] = False
            if not mask.any():
                mask[self._end_ids] = ends
        if not mask.any():
            raise ConstraintFailed(f"{self._kind} allows no token of this model's vocabulary to come next")
        return mask

    def _next_bits(self) -> bytes:
        if self._bits is None:
            if self._is_lost or self.is_stuck:
                raise ConstraintFailed(f"{self._kind} could not be followed: {TOO_COSTLY}")
            self.prepare()
            assert self._job is not None
            try:
                self._bits = self._threads.wait(self._job)
            except MaskFailed as error:
                raise ConstraintFailed(f"{self._kind} could not be followed: {error}") from error
            self._job = None
        return self._bits

    def accept(self, token: int) -> None:
        """The sample's next token is ``token``; one that was not allowed shows in ``allowed``.

        The library holds the interpreter meanwhile. It takes about what the mask before has taken, and
        that is bounded.
        """
        assert self._job is None, "a token was accepted before the mask that allows it was there"
        self._bits = None
        self._is_lost = self._is_lost or self.is_stuck
        if self._is_lost:
            return  # and the next mask says so
        began = time.thread_time()
        self._matcher.consume_token(token)
        self._budget.charge(time.thread_time() - began)
        self._budget.note_token()
