from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import itemgetter

from .types import ScheduledChunk, StepShape

_DECAY = 0.995  # per step, so about 200 steps count
_PRIOR = 1e-3
_MAX_COVARIANCE = 1e6

_PARTNERS = ((1, 0), (3, 0), (4, 2), (2, 4), (0, 1))


class StepCost:
    """A linear model of a step's seconds, fitted by recursive least squares with forgetting.

    Terms: a constant, rows, and positions attended to. Decodes and prompt chunks have separate coefficients.
    Errors are relative, so that long prompts do not outweigh short steps. Steps with prompts count as if
    their last tile of rows were full. (Ljung, System Identification, 2nd ed., 11.2.)
    """

    def __init__(self, row_tile: int = 1) -> None:
        self._row_tile = row_tile
        self._weights = [0.0] * 5
        self._covariance = [1 / _PRIOR if i == j else 0.0 for i in range(5) for j in range(i + 1)]

    def predict(self, shape: StepShape) -> float:
        """Return the predicted seconds of a step; 0 before the first observation.

        The prediction never falls for a larger step.
        """
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
        if not (math.isfinite(seconds) and seconds > 0):
            return
        scale = 1 / seconds
        one, b, c, d, e = _terms(shape, self._row_tile)
        a, b, c, d, e = one * scale, b * scale, c * scale, d * scale, e * scale
        # The lower triangle by rows, written out because loops take three times as long.
        aa, ba, bb, ca, cb, cc, da, db, dc, dd, ea, eb, ec, ed, ee = self._covariance
        if c or e:
            pa = aa * a + ba * b + ca * c + da * d + ea * e
            pb = ba * a + bb * b + cb * c + db * d + eb * e
            pc = ca * a + cb * b + cc * c + dc * d + ec * e
            pd = da * a + db * b + dc * c + dd * d + ed * e
            pe = ea * a + eb * b + ec * c + ed * d + ee * e
        else:
            pa = aa * a + ba * b + da * d
            pb = ba * a + bb * b + db * d
            pc = ca * a + cb * b + dc * d
            pd = da * a + db * b + dd * d
            pe = ea * a + eb * b + ed * d
        gain = _DECAY + a * pa + b * pb + c * pc + d * pd + e * pe
        u, v, w, x, y = self._weights
        error = (1.0 - (u * a + v * b + w * c + x * d + y * e)) / gain
        u, v, w, x, y = u + pa * error, v + pb * error, w + pc * error, x + pd * error, y + pe * error
        self._weights = [u, v, w, x, y]
        f = _DECAY
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
        for each, partner in _PARTNERS:
            weight = self._weights[each]
            if weight < 0.0 and terms[each] > 0.0 and terms[partner] > 0.0:
                self._weights[each] = 0.0
                self._weights[partner] += weight * terms[each] / terms[partner]

    def _bound(self) -> None:
        p = self._covariance
        for k in range(5):
            if p[k * (k + 3) // 2] > _MAX_COVARIANCE:
                for i in range(5):
                    row, column = max(i, k), min(i, k)
                    p[row * (row + 1) // 2 + column] *= 0.25 if i == k else 0.5


def with_chunk(shape: StepShape, start: int, num_tokens: int) -> StepShape:
    return shape._replace(
        num_chunk_tokens=shape.num_chunk_tokens + num_tokens,
        chunk_positions=shape.chunk_positions + num_tokens * start + num_tokens * (num_tokens + 1) // 2,
    )


def with_drafts(shape: StepShape, stop: int, num_drafts: int) -> StepShape:
    return shape._replace(
        num_decodes=shape.num_decodes + num_drafts, num_positions=shape.num_positions + num_drafts * stop
    )


def _terms(shape: StepShape, row_tile: int) -> tuple[float, float, float, float, float]:
    decodes, chunk_tokens, positions, chunk_positions = shape
    if chunk_tokens:
        chunk_tokens += -(decodes + chunk_tokens) % row_tile
    return (1.0, decodes / 16, chunk_tokens / 64, positions / 8192, chunk_positions / 65536)


_GET_STOP = itemgetter(ScheduledChunk._fields.index("stop"))


def decode_shape(work: Sequence[ScheduledChunk]) -> StepShape:
    return StepShape(len(work), 0, sum(map(_GET_STOP, work)), 0)


def shape_of(work: Iterable[ScheduledChunk]) -> StepShape:
    num_decodes = num_positions = num_chunk_tokens = chunk_positions = 0
    for _, start, stop, _, _, drafts in work:
        if stop - start == 1:
            num_decodes += 1 + len(drafts)
            num_positions += stop * (1 + len(drafts))
        else:
            num_chunk_tokens += stop - start
            chunk_positions += (stop - start) * (start + stop + 1) // 2
    return StepShape(num_decodes, num_chunk_tokens, num_positions, chunk_positions)
