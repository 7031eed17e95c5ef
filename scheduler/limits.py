"""What a scheduler may use, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass


class SequenceTooLong(ValueError):
    """The sequence could never fit the page pool, even alone."""


@dataclass(frozen=True, slots=True)
class Limits:
    """max_step_tokens   tokens computed in one step, decodes and prompt chunks together
    max_running       sequences that hold pages at once
    """

    max_step_tokens: int = 512
    max_running: int = 64

    def __post_init__(self) -> None:
        if self.max_running < 1:
            raise ValueError(f"max_running must be at least 1, got {self.max_running}")
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens must be at least max_running, got {self.max_step_tokens} and "
                f"{self.max_running}: a full decode batch has to fit in one step; raise the first or "
                "lower the second"
            )
