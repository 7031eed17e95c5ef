"""Tracks the output of one sample in a grammar, and provides the masks of allowed next tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .mask_budget import MaskBudget
from .mask_threads import MaskFailed, MaskJob, MaskThreads, SharedLexer

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = NDArray[np.bool_]


TOO_COSTLY = "another output with it is too costly to check"


class ConstraintFailed(Exception):
    """The grammar became too expensive to check, or the output left it; the message is for the caller."""


class Constraint:
    """The tokens that a grammar allows next. ``accept`` must be called for every token of the sample.

    A constraint lives as long as its sample; preemption does not affect it. A copy is independent of the
    original. The CPU time of masks is charged to the request's budget.
    """

    __slots__ = (
        "_behind",
        "_bits",
        "_budget",
        "_drafts",
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
        """Begin at the start of the grammar. ``first_mask``: mask of the first token, if known. ``end_ids``:
        tokens that end an output when the grammar allows it."""
        self._matcher = matcher
        self._kind = kind
        self._bits = first_mask
        self._job: MaskJob | None = None  # job that computes the next mask
        self._drafts: tuple[int, ...] = ()  # drafts of the next tokens
        self._behind: list[bytes] = []  # masks after the first draft, the first two drafts, ...
        self._threads = threads
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._budget = budget or MaskBudget()
        self._is_lost = False  # whether a token was not passed on, because a mask was stuck
        self._lexer = lexer or SharedLexer()

    def copy(self) -> Constraint:
        """Return a copy with its own budget. Not allowed while ``prepare`` is running."""
        [copy] = self.copies(1)
        return copy

    def copies(self, num_samples: int) -> list[Constraint]:
        """Return copies for the samples of one request, which share a budget."""
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
        """Whether the mask of another copy takes so long that steps no longer wait for it."""
        return self._lexer.num_stuck > 0

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete, so that only its end may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def completed(self, drafts: Sequence[int], most: int) -> tuple[int, ...]:
        """Return at most ``most`` drafts: ``drafts`` up to the first forbidden one, followed by tokens that
        the grammar forces. Call it between ``accept`` and ``prepare``.

        No draft ends the output, because no token would be sampled after it.
        """
        if self._is_lost or self.is_stuck or most <= 0 or not self._budget.has_drafts:
            return ()
        assert self._job is None, "the matcher is busy"
        began = time.thread_time()
        try:
            tokens = self._followed(drafts[:most], most)
        except BaseException as error:  # the library's panics are not Exceptions
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            tokens = []
        self._budget.charge_drafts(time.thread_time() - began)
        return tuple(tokens)

    def _followed(self, drafts: Sequence[int], most: int) -> list[int]:
        matcher = self._matcher.deep_copy()  # an error in a draft must not affect the output
        tokens = list(drafts[: matcher.try_consume_tokens(list(drafts))])
        if not (matcher.is_error() or matcher.is_stopped()):
            forced = matcher.compute_ff_tokens()[: most - len(tokens)]
            tokens += forced[: matcher.try_consume_tokens(forced)]
        if matcher.is_stopped() and tokens:
            tokens.pop()
        return [] if matcher.is_error() else tokens

    def prepare(self, drafts: Sequence[int] = ()) -> None:
        """Start computing, on another thread, the next mask and the masks after each of ``drafts``, which
        ``completed`` returned. A request over its budget has to wait, see ``is_late``."""
        self._prepare(drafts, may_be_put_off=True)

    def _prepare(self, drafts: Sequence[int] = (), *, may_be_put_off: bool = False) -> None:
        if self._job is None and (self._bits is None or drafts):
            self._drafts, self._behind = tuple(drafts), []
            self._job = MaskJob(
                self._matcher, self._budget, self._lexer, drafts=self._drafts, bits=self._bits
            )
            self._threads.submit(self._job, may_be_put_off=may_be_put_off)

    def drop(self) -> None:
        """Give up the next mask, because the sample has ended."""
        if self._job is not None:
            self._job.is_needed = False

    def after(self, drafts: Sequence[int]) -> BehindDrafts:
        """Return the masks after these drafts are accepted; they must be the first given to ``prepare``."""
        assert tuple(drafts) == self._drafts[: len(drafts)], "the grammar has not checked these drafts"
        return BehindDrafts(self, len(drafts))

    def _bits_behind(self, num_drafts: int, *, may_be_late: bool) -> bytes:
        self._next_bits(may_be_late=may_be_late)
        if num_drafts > len(self._behind):
            raise ConstraintFailed(f"{self._kind} was not checked up to this token")
        return self._behind[num_drafts - 1]

    @property
    def is_late(self) -> bool:
        """Whether the next mask takes so long that steps continue without this sample."""
        job = self._job
        return job is not None and job.is_over and self._threads.has_failed(job) is None

    def allowed(self, *, may_end: bool = True, may_be_late: bool = False) -> Mask:
        """Return the mask [V] of allowed next tokens, at least one. Without ``may_end``, end tokens are left
        out unless nothing else is allowed. Waits for ``prepare`` for a bounded time. Raises ConstraintFailed
        if the mask is not available or too expensive. ``may_be_late``: see ``MaskThreads.wait``."""
        return self._mask(self._next_bits(may_be_late=may_be_late), may_end=may_end)

    def _mask(self, packed: bytes, *, may_end: bool) -> Mask:
        bits = np.frombuffer(packed, np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not may_end:
            ends = mask[self._end_ids]
            mask[self._end_ids] = False
            if not mask.any():
                mask[self._end_ids] = ends
        if not mask.any():
            raise ConstraintFailed(f"{self._kind} allows no token of this model's vocabulary to come next")
        return mask

    def _next_bits(self, *, may_be_late: bool = False) -> bytes:
        if self._bits is None or self._job is not None:
            if self._is_lost or self.is_stuck:
                raise ConstraintFailed(f"{self._kind} could not be checked: {TOO_COSTLY}")
            self._prepare()
            assert self._job is not None
            try:
                self._bits = self._threads.wait(self._job, may_be_late=may_be_late)
                self._behind = self._job.behind
            except MaskFailed as error:
                raise ConstraintFailed(f"{self._kind} could not be checked: {error}") from error
            self._job = None
        return self._bits

    def accept(self, token: int) -> None:
        """Advance by the sample's next token; after a forbidden one, ``allowed`` raises the error.

        The library holds the interpreter lock for about as long as computing the previous mask took, which is
        bounded.
        """
        assert self._job is None, "a token was accepted before its mask was computed"
        held = bool(self._behind) and token == self._drafts[0]
        self._bits = self._behind[0] if held else None  # mask after this token
        self._drafts, self._behind = (self._drafts[1:], self._behind[1:]) if held else ((), [])
        self._is_lost = self._is_lost or self.is_stuck
        if self._is_lost:
            return  # computing the next mask reports it
        began = time.thread_time()
        self._matcher.consume_token(token)
        self._budget.charge(time.thread_time() - began)
        self._budget.note_token()


class BehindDrafts:
    """The masks of a constraint after accepted drafts. Valid until the constraint's next ``accept``."""

    __slots__ = ("_constraint", "_num_drafts")

    def __init__(self, constraint: Constraint, num_drafts: int) -> None:
        self._constraint = constraint
        self._num_drafts = num_drafts

    def allowed(self, *, may_end: bool = True, may_be_late: bool = False) -> Mask:
        """Return the mask as ``Constraint.allowed`` does. Raises ConstraintFailed also if the mask was not
        computed ahead."""
        constraint = self._constraint
        bits = constraint._bits_behind(self._num_drafts, may_be_late=may_be_late)
        return constraint._mask(bits, may_end=may_end)
