"""CPU budget for the masks of one request.

It is a token bucket: each mask takes its CPU seconds, and each generated token adds a few.
"""

from __future__ import annotations

import threading

BURST_S = 0.25  # CPU seconds in a full bucket
TOKEN_S = 0.0015
LATE_S = 0.01  # CPU seconds; steps do not wait for a slower mask
OTHER_TOKEN_S = 0.0002


class MaskBudget:
    """CPU budget of one request, shared by its samples. Thread-safe."""

    def __init__(self, num_samples: int = 1) -> None:
        self._per_token = (TOKEN_S + OTHER_TOKEN_S * (num_samples - 1)) / num_samples
        self._left = BURST_S
        self._left_for_drafts = BURST_S
        self._lock = threading.Lock()
        self.spent_s = 0.0

    def charge(self, seconds: float) -> None:
        with self._lock:
            self._left -= seconds
            self.spent_s += seconds

    def charge_drafts(self, seconds: float) -> None:
        """Charge CPU seconds to the separate budget for draft tokens."""
        with self._lock:
            self._left_for_drafts -= seconds

    def note_token(self) -> None:
        with self._lock:
            self._left = min(BURST_S, self._left + self._per_token)
            self._left_for_drafts = min(BURST_S, self._left_for_drafts + self._per_token)

    @property
    def has_drafts(self) -> bool:
        return self._left_for_drafts > 0

    @property
    def is_spent(self) -> bool:
        return self._left < 0

    @property
    def used_s(self) -> float:
        return BURST_S - self._left

    @property
    def is_half_spent(self) -> bool:
        return self._left < BURST_S / 2

    def is_over(self, running_s: float) -> bool:
        return self._left - running_s < BURST_S / 2 or running_s > LATE_S
