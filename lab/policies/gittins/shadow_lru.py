from __future__ import annotations

MARGIN = 0.001  # share of all released pages by which a policy may fall behind LRU
SLACK = 1 / 12
HALF_LIFE = 8192  # releases after which an observation counts half


class ShadowLRU:
    """Compares the hits that LRU would have with the hits of the policy.

    An LRU pool holds the pages whose last release is later than some time. This class tracks that time.
    """

    def __init__(self, num_pages: int) -> None:
        self.follow_lru = True
        self._num_pages = num_pages
        self._now = 0
        self._since = 1
        self._released: dict[int, int] = {}
        self._num_recent = 0
        self._begin_at: int | None = None
        self._lead = 0.0
        self._total = 0.0
        self._halve_at = HALF_LIFE

    def want(self, released_at: int, *, found: bool) -> None:
        """Count the reuse of a page last released at ``released_at``; ``found``: whether it was cached."""
        if released_at >= self._since:
            self._released[released_at] -= 1
            self._num_recent -= 1
            self._lead -= not found and not self.follow_lru
        else:
            self._lead += found and not self.follow_lru

    def release(self, num_pages: int) -> bool:
        self._now += 1
        self._total += num_pages
        released = self._released
        released[self._now] = num_pages
        self._num_recent += num_pages
        while self._num_recent - released[self._since] >= self._num_pages:
            self._num_recent -= released.pop(self._since)
            self._since += 1
        if self._now >= self._halve_at:
            self._halve_at += HALF_LIFE
            self._lead /= 2
            self._total /= 2
        before = self.follow_lru
        self.follow_lru = self._should_follow()
        return self.follow_lru is not before

    def _should_follow(self) -> bool:
        if self._begin_at is None or self._now < self._begin_at:
            if self._begin_at is None and self._since > 1:
                self._begin_at = 2 * self._now
            return True
        most = MARGIN * self._total + SLACK * self._num_pages
        return -self._lead > (most / 2 if self.follow_lru else most)

    def clear(self) -> None:
        """Forget all pages, because the policy has evicted all its pages."""
        self._released.clear()
        self._num_recent = 0
        self._since = self._now + 1
