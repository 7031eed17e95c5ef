from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

_NONE: Mapping[str, mx.array] = {}


class RowInputs:
    def __init__(self) -> None:
        self.arrays = _NONE

    def get(self, name: str) -> mx.array | None:
        return self.arrays.get(name)

    def clear(self) -> None:
        self.arrays = _NONE
