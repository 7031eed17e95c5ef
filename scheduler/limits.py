"""What a scheduler may use, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class SequenceTooLong(ValueError):
    """The sequence could never fit the page pool, even alone."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds one step.

    max_step_tokens   tokens computed in one step, decodes and prompt chunks together
    max_running       sequences that hold pages at once
    target_itl        seconds that a step may take while somebody decodes: prompts are cut to what is
                      predicted to fit ("auto": a few times what the decodes alone take; None: as many
                      tokens as max_step_tokens allows)
    row_tile          rows that the matrix products compute at once: a part of them takes as long, which
                      chunks that are cut for a target heed (1: every row counts)
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
                f"row_tile must be at least 1, got {self.row_tile}; 1 is for kernels without tiles"
            )
        if isinstance(self.target_itl, float | int) and not self.target_itl > 0:
            raise ValueError(
                f"target_itl must be above 0 seconds, got {self.target_itl}; leave it out for none"
            )
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens must be at least max_running, got {self.max_step_tokens} and "
                f"{self.max_running}: a full decode batch has to fit in one step; raise the first or "
                "lower the second"
            )

    def is_long_prompt(self, num_prompt: int) -> bool:
        """Whether a prompt takes more than one step, whatever is left of it."""
        return num_prompt > self.max_step_tokens
