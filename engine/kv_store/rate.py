"""How fast a store is, as far as was seen lately."""

from __future__ import annotations

FADING = 0.98  # weight of a transfer per transfer after it: some fifty count
HOPE = 0.9  # of the time that is remembered, what is left of it each time it spoke against the store


class Rate:
    """Seconds of transfers over their bytes. One thread observes; another may ask."""

    def __init__(self) -> None:
        self._seconds = self._bytes = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A transfer took so long."""
        self._seconds = FADING * self._seconds + seconds
        self._bytes = FADING * self._bytes + num_bytes

    def seconds(self, num_bytes: int) -> float:
        """That so many bytes are expected to take; 0 before any were seen: then they are worth a try."""
        return num_bytes * self._seconds / self._bytes if self._bytes else 0.0

    def is_within(self, num_bytes: int, limit_s: float) -> bool:
        """Whether so many bytes take less than ``limit_s``. If not, they are thought to take a little less
        next time: a store that was slow once is tried again some time."""
        if self.seconds(num_bytes) < limit_s:
            return True
        self._seconds *= HOPE
        return False
