"""Budget for computing the masks of one request.

It is a token bucket of CPU seconds: every mask takes its time out of the bucket, and every token adds a
little. Wall time does not count, because it grows when other masks delay the engine. Masks for drafts have
their own bucket: when it is empty, the request continues without drafts.
"""

from __future__ import annotations

import threading

BURST_S = 0.25  # CPU seconds in a full bucket
TOKEN_S = 0.0015  # CPU seconds added per token of a request's first sample
LATE_S = 0.01  # CPU seconds of one mask, after which steps go on without its request
OTHER_TOKEN_S = 0.0002  # CPU seconds added per token of the request's other samples


class MaskBudget:
    """Budget of one request, shared by its samples. Thread-safe."""

    def __init__(self, num_samples: int = 1) -> None:
        self._per_token = (TOKEN_S + OTHER_TOKEN_S * (num_samples - 1)) / num_samples
        self._left = BURST_S
        self._left_for_drafts = BURST_S
        self._lock = threading.Lock()
        self.spent_s = 0.0  # CPU seconds spent since the beginning

    def charge(self, seconds: float) -> None:
        with self._lock:
            self._left -= seconds
            self.spent_s += seconds

    def charge_drafts(self, seconds: float) -> None:
        """Take seconds for masks of drafts out of their bucket."""
        with self._lock:
            self._left_for_drafts -= seconds

    def note_token(self) -> None:
        """Add the seconds that a sample earns with a new token."""
        with self._lock:
            self._left = min(BURST_S, self._left + self._per_token)
            self._left_for_drafts = min(BURST_S, self._left_for_drafts + self._per_token)

    @property
    def has_drafts(self) -> bool:
        """Whether the bucket for drafts is not empty."""
        return self._left_for_drafts > 0

    @property
    def is_spent(self) -> bool:
        return self._left < 0

    @property
    def used_s(self) -> float:
        """Seconds missing from a full bucket."""
        return BURST_S - self._left

    @property
    def is_half_spent(self) -> bool:
        return self._left < BURST_S / 2

    def is_over(self, running_s: float) -> bool:
        """Whether a mask that has run this long leaves less than half a bucket, or has run too long.

        Such a request waits for its mask alone, while others continue.
        """
        return self._left - running_s < BURST_S / 2 or running_s > LATE_S
