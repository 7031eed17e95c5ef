from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class SequenceTooLong(ValueError):
    """The sequence could never fit the page pool, even alone."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one step.

    max_step_tokens   maximum number of tokens in a step, decodes and prompt chunks together
    max_running       maximum number of sequences that hold pages
    target_itl        seconds that a step with decodes may take; prefill chunks are shortened to fit
                      ("auto": a few times the decodes alone; None: no limit)
    """

    max_step_tokens: int = 512
    max_running: int = 64
    target_itl: float | Literal["auto"] | None = None
    row_tile: int = 1

    def __post_init__(self) -> None:
        if self.max_running < 1:
            raise ValueError(f"max_running must be at least 1, got {self.max_running}")
        if self.row_tile < 1:
            raise ValueError(
                f"row_tile must be at least 1, got {self.row_tile}; use 1 for kernels without tiles"
            )
        if isinstance(self.target_itl, float | int) and not self.target_itl > 0:
            raise ValueError(
                f"target_itl must be above 0 seconds, got {self.target_itl}; leave it out for no target"
            )
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens must be at least max_running, got {self.max_step_tokens} and "
                f"{self.max_running}: a full decode batch has to fit in one step; raise max_step_tokens or "
                "lower max_running"
            )

    def is_long_prompt(self, num_prompt: int) -> bool:
        """Return whether a prompt takes more than one step."""
        return num_prompt > self.max_step_tokens
