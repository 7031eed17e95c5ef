from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .. import _ext


class CpuPrograms:
    """Captures programs that share the memory of their intermediate results."""

    def __init__(self) -> None:
        self._arena = _ext.Arena()

    def capture(
        self, filled: Sequence[mx.array], fixed: Sequence[mx.array], outputs: Sequence[mx.array]
    ) -> _ext.Program:
        return _ext.Program(self._arena, list(filled), list(fixed), list(outputs))
