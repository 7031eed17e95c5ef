"""Sampling from logits, row by row, in vLLM's order.

Logit bias comes first, then repetition, frequency and presence penalties, then the mask of structured
output. Greedy rows take the largest logit, the lowest id among equals. Other rows are divided by the
temperature, truncated and sampled.

The random number is counter-based: Philox4x64 with the sample's seed as key and the number of generated
tokens as counter (Salmon et al. 2011). So a token does not depend on the batch or on preemption.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...api.errors import InvalidRequest
from ...api.outputs import TokenLogprob
from ...api.sampling_params import SamplingParams
from ...structured_output.constraint import AfterDrafts, ConstraintFailed, Mask
from ...structured_output.mask_threads import MaskLate
from ...structured_output.reasoning_gate import AnyConstraint, ReasoningGate
from .logits_processors import LogitAdjustments, LogitsProcessors
from .truncation import Floats, truncate

GREEDY_BELOW = 1e-5  # temperature, as in vLLM
NOT_FINITE = "the model's logits are not finite (NaN or infinity)"


NO_TOKEN_LEFT = (
    "the request's parameters forbid every token; loosen logit_bias, stop_ids or the structured output"
)


class Sampled(NamedTuple):
    """Sampled token; None if the row failed."""

    token: int | None
    logprob: TokenLogprob | None = None
    error: str | None = None
    invalid: bool = False
    is_late: bool = False  # the row must be computed again, because the grammar's mask is not ready


LATE = Sampled(token=None, is_late=True)


class SampleState:
    """Parameters, seed and token counts of one sample.

    The k-th token depends only on the logits and (seed, k). Each sample of a request needs a different seed.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt_ids: Sequence[int],
        vocab_size: int,
        end_ids: Collection[int] = (),
        bad_ids: Sequence[Sequence[int]] = (),
        constraint: AnyConstraint | None = None,
    ) -> None:
        """Raises InvalidRequest if the logit bias names a token outside the vocabulary."""
        outside = [token for token in params.logit_bias if not 0 <= token < vocab_size]
        if outside:
            raise InvalidRequest(
                f"logit_bias must have token ids in [0, {vocab_size}), got {outside[0]}; correct it"
            )
        self.params = params
        self.seed = seed % 2**64
        self.num_generated = 0
        self.constraint = constraint
        self.mask_may_be_late = False
        self._behind: AfterDrafts | ReasoningGate | None = None
        self.greedy = params.temperature < GREEDY_BELOW
        self._processors = LogitsProcessors(
            params, prompt_ids=prompt_ids, vocab_size=vocab_size, end_ids=end_ids, bad_ids=bad_ids
        )
        self._vocab_size = vocab_size
        self._listed: Mask | None = None
        adjusts = constraint is not None or self._processors.any or bool(params.allowed_token_ids)
        self._asks_nothing = not adjusts and params.logprobs is None
        self._may_suppress = len(self._processors.suppressed_ids) > 0

    @property
    def is_unprocessed(self) -> bool:
        return self._asks_nothing and not self._suppresses_end

    @property
    def is_argmax(self) -> bool:
        return self.greedy and self._asks_nothing and not self._suppresses_end

    @property
    def _suppresses_end(self) -> bool:
        return self._may_suppress and self.num_generated < self.params.min_tokens

    @property
    def is_foreseen(self) -> bool:
        return self.constraint is None and not self._processors.follows

    @property
    def may_end(self) -> bool:
        return not self.params.ignore_eos and self.num_generated >= self.params.min_tokens

    def record(self, token: int) -> None:
        self.num_generated += 1
        if self.constraint is not None:
            self.constraint.accept(token)
        if self._processors.follows:
            self._processors.record(token)

    def after(self, tokens: Sequence[int]) -> SampleState:
        """Return the state after ``tokens``, valid until the next ``record``."""
        ahead = copy.copy(self)
        ahead._behind = None if self.constraint is None else self.constraint.after(tokens)
        ahead.num_generated += len(tokens)
        ahead._processors = self._processors.after(tokens)
        return ahead

    def with_drafts(self, tokens: Sequence[int]) -> SampleState:
        """Return the state after ``tokens`` for a draft model.

        Both models use the target's random number, so similar models mostly sample equal tokens.
        """
        ahead = copy.copy(self)
        ahead.num_generated += len(tokens)
        ahead._processors = self._processors.after(tokens) if tokens else self._processors
        ahead.constraint = ahead._behind = None
        return ahead

    @property
    def changes(self) -> LogitAdjustments | None:
        suppress = self._suppresses_end and self.constraint is None
        return self._processors.changes(suppress=suppress) if suppress or self._processors.any else None

    def allowed(self) -> Mask | None:
        """Return the allowed tokens [V]; None: all. Raises ConstraintFailed or MaskLate."""
        grammar = self.constraint if self._behind is None else self._behind
        if self._listed is None and self.params.allowed_token_ids:
            self._listed = np.zeros(self._vocab_size, np.bool_)
            self._listed[list(self.params.allowed_token_ids)] = True
        if grammar is None:
            return self._listed
        allowed = grammar.allowed(may_end=self.may_end, may_be_late=self.mask_may_be_late)
        return allowed if self._listed is None else allowed & self._listed

    def adjust_in_place(self, logits: Floats) -> None:
        """Apply all changes to logits [V]. Raises ConstraintFailed or MaskLate."""
        if (changes := self.changes) is not None:
            changes.apply(logits)
        if (allowed := self.allowed()) is not None:
            logits[~allowed] = -np.inf

    def uniform(self) -> float:
        """Return the random number in [0, 1) for the next token."""
        bits = np.random.Philox(key=self.seed, counter=self.num_generated).random_raw()
        return float(int(bits) >> 11) * 2.0**-53


def sample(logits: Iterable[Floats], states: Sequence[SampleState]) -> list[Sampled]:
    """Sample one token for each row [V] of float32 logits, in place.

    A row fails alone if its largest value is NaN or +infinity.
    """
    return [_sample_row(row, state) for row, state in zip(logits, states, strict=True)]


def _sample_row(logits: Floats, state: SampleState) -> Sampled:
    params, adjusted = state.params, logits if state.is_unprocessed else logits.copy()
    if (failure := _adjust_row(adjusted, state)) is not None:
        return failure
    if state.greedy:
        token = int(np.argmax(adjusted))
    else:
        candidates = truncate(
            adjusted,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )
        token = candidates.sample(state.uniform())
    wanted = params.logprobs
    return Sampled(token, None if wanted is None else logprob_of(adjusted, token, wanted))


def _adjust_row(logits: Floats, state: SampleState) -> Sampled | None:
    if not is_finite(logits):
        return Sampled(token=None, error=NOT_FINITE)
    try:
        state.adjust_in_place(logits)
    except ConstraintFailed as error:
        return Sampled(token=None, error=str(error), invalid=True)
    except MaskLate:
        return LATE
    if not state.is_unprocessed and not np.isfinite(logits.max()):
        return Sampled(token=None, error=NO_TOKEN_LEFT, invalid=True)
    return None


def is_finite(logits: Floats) -> bool:
    """Whether the largest value of logits [V] is finite."""
    return bool(np.isfinite(logits[np.argmax(logits)]))


def logprob_of(logits: Floats, token: int, num_top: int) -> TokenLogprob:
    """Return log-probabilities of ``token`` and of the ``num_top`` likeliest tokens."""
    largest = logits.max()
    with np.errstate(under="ignore"):
        total = float(np.exp(logits - largest).sum(dtype=np.float64))
    log_total = float(largest) + float(np.log(total))
    num_top = min(num_top, len(logits))
    ids: NDArray[Any] = np.empty(0, np.intp)
    if num_top:
        ids = np.flatnonzero(logits >= np.partition(logits, -num_top)[-num_top])
        ids = ids[np.argsort(-logits[ids], kind="stable")][:num_top]
        ids = ids[np.isfinite(logits[ids])]  # excluded tokens are not listed
    return TokenLogprob(
        token_id=token,
        logprob=float(logits[token]) - log_total,
        top=tuple((int(i), float(logits[i]) - log_total) for i in ids),
    )


def greedy_samples(tokens: Any, logits: Any) -> list[Sampled]:
    rows = zip(tokens, logits, strict=True)
    return [
        Sampled(token) if math.isfinite(logit) else Sampled(None, error=NOT_FINITE) for token, logit in rows
    ]
