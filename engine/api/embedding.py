"""Embeddings: normalizing and cutting of a pooled hidden state."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .errors import InvalidRequest
from .setting_types import check_count


def check_dimensions(dimensions: int | None) -> None:
    """InvalidRequest for what no model has, before anything is computed."""
    check_count("dimensions", dimensions, "all")


def finished(
    vector: Sequence[float], *, dimensions: int | None = None, normalize: bool = True
) -> list[float]:
    """The first ``dimensions`` numbers (Matryoshka embeddings; None: all of them), of length 1 if it is to be
    normalized: cut first, so that what is left has length 1. InvalidRequest for more than there are.
    """
    if dimensions is not None and not 1 <= dimensions <= len(vector):
        raise InvalidRequest(
            f"dimensions must be between 1 and {len(vector)}, what this model has, got {dimensions}"
        )
    cut = list(vector[:dimensions])
    length = math.sqrt(math.fsum(value * value for value in cut)) if normalize else 1.0
    return [value / length for value in cut] if length > 0 else cut
