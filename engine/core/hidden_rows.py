"""Whose hidden states a step is asked for, and who gets which."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.kernels.metadata import Ints

States = npt.NDArray[np.float32]
Wanted = tuple[Ints, Callable[[States], None]]


class HiddenRows(NamedTuple):
    """Rows of one step that several ask for: ``wanted`` are those of each, ascending."""

    wanted: tuple[Wanted, ...]

    @property
    def rows(self) -> Ints | None:
        """All of them, ascending, each once; None when nobody asks."""
        if not self.wanted:
            return None
        if len(self.wanted) == 1:
            return self.wanted[0][0]
        return np.unique(np.concatenate([rows for rows, _ in self.wanted]))

    def deliver(self, states: States | None) -> None:
        """Give everyone their rows of ``states``, which are those of ``rows``."""
        if states is None:
            return
        every = self.rows
        assert every is not None
        for rows, give in self.wanted:
            give(states[np.searchsorted(every, rows)])


NOBODY = HiddenRows(())
