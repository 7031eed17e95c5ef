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

    def predict(self, shape: StepShape) -> float:
        """Seconds that a step will take; 0 before anything was observed.

        Never less for a larger step: a coefficient that noise has made negative counts as none."""
        _, b, c, d, e = _terms(shape, self._row_tile)
        u, v, w, x, y = self._weights
        seconds = u if u > 0.0 else 0.0
        if v > 0.0:
            seconds += v * b
        if w > 0.0:
            seconds += w * c
        if x > 0.0:
            seconds += x * d
        if y > 0.0:
            seconds += y * e
        return seconds

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that took so long."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        scale = 1 / seconds  # relative errors
        one, b, c, d, e = _terms(shape, self._row_tile)
        a, b, c, d, e = one * scale, b * scale, c * scale, d * scale, e * scale
        # The lower triangle by rows, written out: loops take three times as long, after every step.
        aa, ba, bb, ca, cb, cc, da, db, dc, dd, ea, eb, ec, ed, ee = self._covariance
        if c or e:
            pa = aa * a + ba * b + ca * c + da * d + ea * e
            pb = ba * a + bb * b + cb * c + db * d + eb * e
            pc = ca * a + cb * b + cc * c + dc * d + ec * e
            pd = da * a + db * b + dc * c + dd * d + ed * e
            pe = ea * a + eb * b + ec * c + ed * d + ee * e
        else:  # no prompts: most steps
            pa = aa * a + ba * b + da * d
            pb = ba * a + bb * b + db * d
            pc = ca * a + cb * b + dc * d
            pd = da * a + db * b + dd * d
            pe = ea * a + eb * b + ed * d
        gain = _FORGETTING + a * pa + b * pb + c * pc + d * pd + e * pe
        u, v, w, x, y = self._weights
        error = (1.0 - (u * a + v * b + w * c + x * d + y * e)) / gain
        u, v, w, x, y = u + pa * error, v + pb * error, w + pc * error, x + pd * error, y + pe * error
        self._weights = [u, v, w, x, y]
        f = _FORGETTING
        aa = (aa - pa * pa / gain) / f
        bb = (bb - pb * pb / gain) / f
        cc = (cc - pc * pc / gain) / f
        dd = (dd - pd * pd / gain) / f
        ee = (ee - pe * pe / gain) / f
        self._covariance = [
            aa,
            (ba - pb * pa / gain) / f, bb,
            (ca - pc * pa / gain) / f, (cb - pc * pb / gain) / f, cc,
            (da - pd * pa / gain) / f, (db - pd * pb / gain) / f, (dc - pd * pc / gain) / f, dd,
            (ea - pe * pa / gain) / f, (eb - pe * pb / gain) / f, (ec - pe * pc / gain) / f,
            (ed - pe * pd / gain) / f, ee,
        ]  # fmt: skip
        most = _MAX_COVARIANCE
        if aa > most or bb > most or cc > most or dd > most or ee > most:
            self._bound()
        if u < 0.0 or v < 0.0 or w < 0.0 or x < 0.0 or y < 0.0:
            self._shift((a, b, c, d, e))

    def _shift(self, terms: Sequence[float]) -> None:
        """Make negative coefficients zero, and change their partners.

        A step of these terms, or of multiples of them, is predicted as before. Terms that hardly vary, such
        as the constant and as many rows in every step, cannot be told apart: one becomes too large and the
        other negative, and steps would be predicted by what is too large alone."""
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
