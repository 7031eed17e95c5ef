"""How long a step will take, learned from the steps before it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import itemgetter

from .types import ScheduledChunk, StepShape

_FORGETTING = 0.995  # weight of one step's observation per step after it: some 200 steps count
_PRIOR = 1e-3  # of the inverse covariance: what is known before the first step, next to nothing
_MAX_COVARIANCE = 1e6  # without news in some direction, forgetting would let it grow without bound

_PARTNERS = ((1, 0), (3, 0), (4, 2), (2, 4), (0, 1))  # of terms, see ``_terms``: rows and the constant, ...


class StepCost:
    """A linear model of a step's seconds, fitted by recursive least squares with forgetting.

    The terms are what dominates on any backend: a constant (reading the weights, the host's own work), a
    cost for each row, one for each position attended to. Errors are relative, so that steps of a long prompt
    do not drown the short ones. Five numbers that forget follow a machine whose speed drifts.
    (Ljung, System Identification, 2nd ed., section 11.2.)

    Kernels that compute rows in tiles take as long for a part of a tile as for all of it. A step with prompts
    counts as if its last tile were full; so a chunk that is cut to a time ends where a tile does, mostly.
    """

    def __init__(self, row_tile: int = 1) -> None:
        """``row_tile``: rows of a tile of the matrix products, see ``Limits``."""
        self._row_tile = row_tile
        self._weights = [0.0] * 5
        self._covariance = [1 / _PRIOR if i == j else 0.0 for i in range(5) for j in range(i + 1)]
        self.num_steps = 0

    def predict(self, shape: StepShape) -> float:
        """Seconds that a step will take; 0 before anything was observed. Never less for a larger step: a
        coefficient that noise has made negative counts as none."""
        terms = _terms(shape, self._row_tile)
        return sum([w * x for w, x in zip(self._weights, terms, strict=True) if w > 0.0])

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that took so long."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        self.num_steps += 1
        scale = 1 / seconds  # relative errors
        x = a, b, c, d, e = [term * scale for term in _terms(shape, self._row_tile)]
        # The lower triangle by rows, written out: loops take three times as long, after every step.
        aa, ba, bb, ca, cb, cc, da, db, dc, dd, ea, eb, ec, ed, ee = self._covariance
        if c or e:
            px = (
                aa * a + ba * b + ca * c + da * d + ea * e,
                ba * a + bb * b + cb * c + db * d + eb * e,
                ca * a + cb * b + cc * c + dc * d + ec * e,
                da * a + db * b + dc * c + dd * d + ed * e,
                ea * a + eb * b + ec * c + ed * d + ee * e,
            )
        else:  # no prompts: most steps
            px = (
                aa * a + ba * b + da * d,
                ba * a + bb * b + db * d,
                ca * a + cb * b + dc * d,
                da * a + db * b + dd * d,
                ea * a + eb * b + ed * d,
            )
        pa, pb, pc, pd, pe = px
        gain_over = _FORGETTING + a * pa + b * pb + c * pc + d * pd + e * pe
        error = (1.0 - sum([w * term for w, term in zip(self._weights, x, strict=True)])) / gain_over
        self._weights = [w + each * error for w, each in zip(self._weights, px, strict=True)]
        products = (
            pa * pa,
            pb * pa, pb * pb,
            pc * pa, pc * pb, pc * pc,
            pd * pa, pd * pb, pd * pc, pd * pd,
            pe * pa, pe * pb, pe * pc, pe * pd, pe * pe,
        )  # fmt: skip
        self._covariance = p = [
            (old - new / gain_over) / _FORGETTING for old, new in zip(self._covariance, products, strict=True)
        ]
        if max(p[0], p[2], p[5], p[9], p[14]) > _MAX_COVARIANCE:
            self._bound()
        if min(self._weights) < 0.0:
            self._shift(x)

    def _shift(self, terms: Sequence[float]) -> None:
        """Make negative coefficients zero, and change their partners so that a step of these terms, or of
        multiples of them, is predicted as before. Terms that hardly vary, such as the constant and as many
        rows in every step, cannot be told apart: one becomes too large and the other negative, and steps
        would be predicted by what is too large alone."""
        for each, partner in _PARTNERS:
            weight = self._weights[each]
            if weight < 0.0 and terms[each] > 0.0 and terms[partner] > 0.0:
                self._weights[each] = 0.0
                self._weights[partner] += weight * terms[each] / terms[partner]

    def _bound(self) -> None:
        """Halve the rows and columns of the covariance whose diagonal has grown too large."""
        p = self._covariance
        for k in range(5):
            if p[k * (k + 3) // 2] > _MAX_COVARIANCE:
                for i in range(5):
                    row, column = max(i, k), min(i, k)
                    p[row * (row + 1) // 2 + column] *= 0.25 if i == k else 0.5


def with_chunk(shape: StepShape, start: int, num_tokens: int) -> StepShape:
    """The shape of a step with ``num_tokens`` more, of a prompt that stands at ``start``."""
    return shape._replace(
        num_chunk_tokens=shape.num_chunk_tokens + num_tokens,
        chunk_positions=shape.chunk_positions + num_tokens * start + num_tokens * (num_tokens + 1) // 2,
    )


def with_drafts(shape: StepShape, stop: int, num_drafts: int) -> StepShape:
    """The shape of a step with so many drafts more, of a sequence of ``stop`` tokens."""
    return shape._replace(
        num_decodes=shape.num_decodes + num_drafts, num_positions=shape.num_positions + num_drafts * stop
    )


def _terms(shape: StepShape, row_tile: int) -> tuple[float, float, float, float, float]:
    """Scaled so that coefficients are of one order: milliseconds for most models.

    Where every step has r rows, the constant and the rows cannot be told apart, and their scales share the
    time: r^2 / 16^2 parts are the rows', one the constant's. One row more is 1/64 to 1/32 of a step then, for
    4 to 60 rows; a smaller scale would make rows look dear, and drafts not worth their rows."""
    decodes, chunk_tokens, positions, chunk_positions = shape
    if chunk_tokens:  # a step of decodes alone has kernels of its own
        chunk_tokens += -(decodes + chunk_tokens) % row_tile
    return (1.0, decodes / 16, chunk_tokens / 64, positions / 8192, chunk_positions / 65536)


_STOP = itemgetter(
    ScheduledChunk._fields.index("stop")
)  # three times as fast as the attribute, for each row of each step


def decode_shape(work: Sequence[ScheduledChunk]) -> StepShape:
    """``shape_of`` for work of one token each and no drafts."""
    return StepShape(len(work), 0, sum(map(_STOP, work)), 0)


def shape_of(work: Iterable[ScheduledChunk]) -> StepShape:
    """The shape of a planned step."""
    num_decodes = num_positions = num_chunk_tokens = chunk_positions = 0
    for _, start, stop, _, _, drafts in work:
        if stop - start == 1:
            num_decodes += 1 + len(drafts)
            num_positions += stop * (1 + len(drafts))
        else:
            num_chunk_tokens += stop - start
            chunk_positions += (stop - start) * (start + stop + 1) // 2
    return StepShape(num_decodes, num_chunk_tokens, num_positions, chunk_positions)
