from __future__ import annotations

from octavo.scheduler.types import StepShape


def machine(shape: StepShape, speed: float = 1.0) -> float:
    """Return seconds of a step, roughly as for a 0.6B model on two cores."""
    decodes, chunk, positions, chunk_positions = shape
    return speed * (0.015 + 0.0008 * decodes + 0.0016 * chunk + 2e-7 * positions + 4e-8 * chunk_positions)
