"""Where one sample stands in its grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .library import first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = NDArray[np.bool_]


class ConstraintFailed(Exception):
    """The grammar got too costly to follow, or was not followed; the message is for the caller."""


class Constraint:
    """Which tokens may come next. Follows the tokens of one sample: ``accept`` each one in turn.

    Lives as long as the sample: preemption recomputes K/V and leaves it alone. A copy is
    independent of the original.
    """

    __slots__ = ("_bits", "_end_ids", "_kind", "_matcher", "_vocab_size")

    def __init__(
        self,
        matcher: LLMatcher,
        kind: str,
        *,
        first_mask: bytes | None = None,
        vocab_size: int,
        end_ids: NDArray[np.intp],
    ) -> None:
        """``first_mask``: bits of the tokens that may come first, if they are known. ``end_ids``: tokens
        that end an output where the grammar lets it end."""
        self._matcher = matcher
        self._kind = kind
        self._bits = first_mask
        self._vocab_size = vocab_size
        self._end_ids = end_ids

    def copy(self) -> Constraint:
        return Constraint(
            self._matcher.deep_copy(),
            self._kind,
            first_mask=self._bits,
            vocab_size=self._vocab_size,
            end_ids=self._end_ids,
        )

    @property
    def is_complete(self) -> bool:
        """Whether the output is whole and nothing may follow but its end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self, *, may_end: bool = True) -> Mask:
        """[V] tokens that may come next, never none of them. Without ``may_end`` the end tokens
        are not among them, unless nothing else may follow. ConstraintFailed if nobody can say."""
        if self._bits is None:
            self._bits = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                raise ConstraintFailed(
                    f"{self._kind} could not be followed: {first_line(self._matcher.get_error())}"
                )
        bits = np.frombuffer(self._bits, np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not may_end:
            ends = mask[self._end_ids]
            mask[self._end_ids] = False
            if not mask.any():
                mask[self._end_ids] = ends
        if not mask.any():
            raise ConstraintFailed(f"{self._kind} allows no token of this model's vocabulary to come next")
        return mask

    def accept(self, token: int) -> None:
        """The sample's next token is ``token``; one that was not allowed shows in ``allowed``."""
        self._bits = None
        self._matcher.consume_token(token)
