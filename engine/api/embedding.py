from __future__ import annotations

import math
from collections.abc import Sequence

from .errors import InvalidRequest
from .setting_types import check_count


def check_dimensions(dimensions: int | None) -> None:
    check_count("dimensions", dimensions, "all")


def finished(
    vector: Sequence[float], *, dimensions: int | None = None, normalize: bool = True
) -> list[float]:
    """Truncate a vector to ``dimensions`` (None: all), then optionally scale it to length 1. Raises
    InvalidRequest if the vector is shorter."""
    if dimensions is not None and not 1 <= dimensions <= len(vector):
        raise InvalidRequest(
            f"dimensions must be between 1 and {len(vector)} for this model, got {dimensions}"
        )
    cut = list(vector[:dimensions])
    length = math.sqrt(math.fsum(value * value for value in cut)) if normalize else 1.0
    return [value / length for value in cut] if length > 0 else cut
