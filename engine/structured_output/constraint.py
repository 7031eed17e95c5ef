from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .mask_budget import MaskBudget
from .mask_threads import MaskFailed, MaskJob, MaskThreads, SharedLexer

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = NDArray[np.bool_]


TOO_COSTLY = "checking it for another output was too costly"


class ConstraintFailed(Exception):
    """The grammar is too expensive to check, or the output violates it."""


@dataclass(slots=True, eq=False)
class Constraint:
    """Tokens that a grammar allows next. Call ``accept`` for every token of the sample.

    ``bits`` is the next mask, packed; None until it is computed.
    """

    matcher: LLMatcher
    kind: str
    bits: bytes | None = field(kw_only=True)
    threads: MaskThreads = field(kw_only=True)
    vocab_size: int = field(kw_only=True)
    end_ids: NDArray[np.intp] = field(kw_only=True)
    budget: MaskBudget = field(default_factory=MaskBudget, kw_only=True)
    lexer: SharedLexer = field(default_factory=SharedLexer, kw_only=True)
    _job: MaskJob | None = field(default=None, init=False)
    _drafts: tuple[int, ...] = field(default=(), init=False)
    _bits_after_drafts: list[bytes] = field(default_factory=list, init=False)
    _is_lost: bool = field(default=False, init=False)

    def copy(self) -> Constraint:
        """Return a copy with its own CPU budget."""
        [copy] = self.copies(1)
        return copy

    def copies(self, num_samples: int) -> list[Constraint]:
        """Return copies with a shared CPU budget, for the samples of one request."""
        budget = MaskBudget(num_samples)
        return [replace(self, matcher=self.matcher.deep_copy(), budget=budget) for _ in range(num_samples)]

    @property
    def is_stuck(self) -> bool:
        return self.lexer.num_stuck > 0

    @property
    def is_complete(self) -> bool:
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def completed(self, drafts: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Return at most ``max_tokens`` tokens: allowed drafts, then forced tokens."""
        if self._is_lost or self.is_stuck or max_tokens <= 0 or not self.budget.has_drafts:
            return ()
        assert self._job is None, "the matcher is busy"
        began = time.thread_time()
        try:
            tokens = self._followed(drafts[:max_tokens], max_tokens)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            tokens = []
        self.budget.charge_drafts(time.thread_time() - began)
        return tuple(tokens)

    def _followed(self, drafts: Sequence[int], max_tokens: int) -> list[int]:
        matcher = self.matcher.deep_copy()  # an error in a draft must not affect the output
        tokens = list(drafts[: matcher.try_consume_tokens(list(drafts))])
        if not (matcher.is_error() or matcher.is_stopped()):
            forced = matcher.compute_ff_tokens()[: max_tokens - len(tokens)]
            tokens += forced[: matcher.try_consume_tokens(forced)]
        if matcher.is_stopped() and tokens:
            tokens.pop()
        return [] if matcher.is_error() else tokens

    def prepare(self, drafts: Sequence[int] = ()) -> None:
        """Start to compute the next masks on another thread."""
        self._prepare(drafts, may_defer=True)

    def _prepare(self, drafts: Sequence[int] = (), *, may_defer: bool = False) -> None:
        if self._job is None and (self.bits is None or drafts):
            self._drafts, self._bits_after_drafts = tuple(drafts), []
            self._job = MaskJob(self.matcher, self.budget, self.lexer, drafts=self._drafts, bits=self.bits)
            self.threads.submit(self._job, may_defer=may_defer)

    def drop(self) -> None:
        if self._job is not None:
            self._job.is_needed = False

    def after(self, drafts: Sequence[int]) -> AfterDrafts:
        assert tuple(drafts) == self._drafts[: len(drafts)], "the grammar has not checked these drafts"
        return AfterDrafts(self, len(drafts))

    def _bits_after(self, num_drafts: int, *, may_be_late: bool) -> bytes:
        self._next_bits(may_be_late=may_be_late)
        if num_drafts > len(self._bits_after_drafts):
            raise ConstraintFailed(f"the {self.kind} has not yet checked the output up to this token")
        return self._bits_after_drafts[num_drafts - 1]

    @property
    def is_late(self) -> bool:
        job = self._job
        return job is not None and job.is_over and self.threads.has_failed(job) is None

    def allowed(self, *, may_end: bool = True, may_be_late: bool = False) -> Mask:
        """Wait for the mask [V] of allowed tokens. Raises ConstraintFailed if it takes too long."""
        return self._mask(self._next_bits(may_be_late=may_be_late), may_end=may_end)

    def _mask(self, packed: bytes, *, may_end: bool) -> Mask:
        bits = np.frombuffer(packed, np.uint8)
        mask = np.unpackbits(bits, count=self.vocab_size, bitorder="little").view(np.bool_)
        if not may_end:
            ends = mask[self.end_ids]
            mask[self.end_ids] = False
            if not mask.any():
                mask[self.end_ids] = ends
        if not mask.any():
            raise ConstraintFailed(f"{self.kind} allows no token of this model's vocabulary here")
        return mask

    def _next_bits(self, *, may_be_late: bool = False) -> bytes:
        if self.bits is None or self._job is not None:
            if self._is_lost or self.is_stuck:
                raise ConstraintFailed(f"{self.kind} could not be checked: {TOO_COSTLY}")
            self._prepare()
            assert self._job is not None
            try:
                self.bits = self.threads.wait(self._job, may_be_late=may_be_late)
                self._bits_after_drafts = self._job.masks_after_drafts
            except MaskFailed as error:
                raise ConstraintFailed(f"{self.kind} could not be checked: {error}") from error
            self._job = None
        return self.bits

    def accept(self, token: int) -> None:
        assert self._job is None, "a token was accepted before its mask was computed"
        held = bool(self._bits_after_drafts) and token == self._drafts[0]
        self.bits = self._bits_after_drafts[0] if held else None
        self._drafts, self._bits_after_drafts = (
            (self._drafts[1:], self._bits_after_drafts[1:]) if held else ((), [])
        )
        self._is_lost = self._is_lost or self.is_stuck
        if self._is_lost:
            return
        began = time.thread_time()
        self.matcher.consume_token(token)
        self.budget.charge(time.thread_time() - began)
        self.budget.note_token()


@dataclass(frozen=True, slots=True)
class AfterDrafts:
    constraint: Constraint
    num_drafts: int

    def allowed(self, *, may_end: bool = True, may_be_late: bool = False) -> Mask:
        """Return the mask [V] of allowed tokens. Raises ConstraintFailed if the mask was not computed."""
        constraint = self.constraint
        bits = constraint._bits_after(self.num_drafts, may_be_late=may_be_late)
        return constraint._mask(bits, may_end=may_end)
