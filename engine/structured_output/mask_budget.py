"""What following one request's grammar may cost while it is served.

A bucket of CPU seconds: every mask takes out of it what it took to compute, and every token fills it a
little. Not the time that passes: masks that hold up the engine make time pass. What is computed for drafts
has a bucket of its own: when that is empty there are no drafts, and the request goes on.
"""

from __future__ import annotations

import threading

BURST_S = 0.25  # what the bucket holds, and is full of at first
TOKEN_S = 0.0015  # each token of a request's first sample fills it by so much
LATE_S = 0.01  # CPU seconds of one mask, after which steps go on without its request
OTHER_TOKEN_S = 0.0002  # ... and each of its other samples


class MaskBudget:
    """One request's, for all of its samples together. Safe to use from several threads."""

    def __init__(self, num_samples: int = 1) -> None:
        self._per_token = (TOKEN_S + OTHER_TOKEN_S * (num_samples - 1)) / num_samples
        self._left = BURST_S
        self._left_for_drafts = BURST_S
        self._lock = threading.Lock()
        self.spent_s = 0.0  # since the beginning

    def charge(self, seconds: float) -> None:
        with self._lock:
            self._left -= seconds
            self.spent_s += seconds

    def charge_drafts(self, seconds: float) -> None:
        """The same for what only drafts need."""
        with self._lock:
            self._left_for_drafts -= seconds

    def note_token(self) -> None:
        """A sample has got a token."""
        with self._lock:
            self._left = min(BURST_S, self._left + self._per_token)
            self._left_for_drafts = min(BURST_S, self._left_for_drafts + self._per_token)

    @property
    def has_drafts(self) -> bool:
        """Whether there is something left for drafts."""
        return self._left_for_drafts > 0

    @property
    def is_spent(self) -> bool:
        return self._left < 0

    @property
    def used_s(self) -> float:
        """Seconds that are missing in the bucket."""
        return BURST_S - self._left

    @property
    def is_half_spent(self) -> bool:
        return self._left < BURST_S / 2

    def is_over(self, running_s: float) -> bool:
        """Whether a mask that has been computed for so long, and is not done, has used up half of the rest.

        Such a request waits for its mask alone, while others go on."""
        return self._left - running_s < BURST_S / 2 or running_s > LATE_S
