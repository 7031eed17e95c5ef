"""A shadow LRU: what LRU would have found in the same pool, to measure another policy against."""

from __future__ import annotations

MARGIN = 0.001  # of all pages released: so far may a policy fall behind LRU,
SLACK = 1 / 12  # and by this part of the pool: what pays later costs at first
HALF_LIFE = 8192  # releases after which the past counts half


class ShadowLRU:
    """Follows how many of the pages that are wanted again LRU would have, and how many the policy has.

    LRU has what was released last and fills the pool: all pages released after a certain time, which
    this keeps up to date. It errs in favour of LRU, by part of one release. O(1) per page.

    num_pages     of the pool
    follow_lru    whether the policy should do as LRU does: at first, until it has seen what comes back
                  after twice the time that LRU keeps a page; and when it has fallen behind by more than
                  ``MARGIN``, until that is half as much of all that was released since
    """

    def __init__(self, num_pages: int) -> None:
        self.follow_lru = True
        self._num_pages = num_pages
        self._now = 0
        self._since = 1  # LRU has what was released then or later
        self._released: dict[int, int] = {}  # by time since then: pages that were not wanted again
        self._num_recent = 0  # of them all
        self._begin_at: int | None = None
        self._lead = 0.0  # pages the policy found and LRU would not have found, less the opposite
        self._total = 0.0
        self._halve_at = HALF_LIFE

    def want(self, released_at: int, *, found: bool) -> None:
        """A page that was last released at that time is used again."""
        if released_at >= self._since:
            self._released[released_at] -= 1
            self._num_recent -= 1
            self._lead -= not found and not self.follow_lru
        else:
            self._lead += found and not self.follow_lru

    def release(self, num_pages: int) -> bool:
        """One time unit has passed; True if ``follow_lru`` has changed."""
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
            if self._begin_at is None and self._since > 1:  # the pool is full for the first time
                self._begin_at = 2 * self._now
            return True
        most = MARGIN * self._total + SLACK * self._num_pages
        return -self._lead > (most / 2 if self.follow_lru else most)

    def clear(self) -> None:
        """Nothing is left in the pool, whatever the policy."""
        self._released.clear()
        self._num_recent = 0
        self._since = self._now + 1
