"""Recent speed of a store."""

from __future__ import annotations

FADING = 0.98  # factor of a transfer's weight per later transfer; about fifty count
HOPE = 0.9  # factor of the measured time each time it decides against the store


class Rate:
    """Seconds per byte of recent transfers. One thread observes; another may read."""

    def __init__(self) -> None:
        self._seconds = self._bytes = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Record a transfer."""
        self._seconds = FADING * self._seconds + seconds
        self._bytes = FADING * self._bytes + num_bytes

    def seconds(self, num_bytes: int) -> float:
        """Return the expected seconds for ``num_bytes``; 0 before the first transfer, so that one is
        tried."""
        return num_bytes * self._seconds / self._bytes if self._bytes else 0.0

    def is_within(self, num_bytes: int, limit_s: float) -> bool:
        """Whether ``num_bytes`` are expected to take less than ``limit_s``. If not, the estimate is lowered a
        little, so that a slow store is tried again."""
        if self.seconds(num_bytes) < limit_s:
            return True
        self._seconds *= HOPE
        return False
