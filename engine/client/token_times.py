"""Times at which the tokens of a request reached its client."""

from __future__ import annotations

from dataclasses import dataclass, field

RESOLUTION_S = 0.01
"""Spans shorter than this many seconds give no rate. A client process is not woken more precisely, and tokens
that already wait for it seem to arrive in no time."""


@dataclass(slots=True)
class TokenTimes:
    """Arrival times of the messages of one request. A message may bring several tokens, and a first message
    that is read late brings tokens that were ready long before. So ``num_later`` leaves out the tokens of a
    sample's first message, and gaps are those between messages, not tokens.

    began       time at which the request was sent, by the clock passed to ``add``
    gaps_s      seconds between messages with tokens
    num_later   tokens that came after the first message of their sample
    """

    began: float
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_later: int = 0
    _ended: float = 0.0
    _first: float | None = None
    _last: float = 0.0
    _samples: set[int] = field(default_factory=set)  # samples that have begun

    def __post_init__(self) -> None:
        self._ended = self.began

    def add(self, now: float, num_tokens: int, sample: int = 0) -> None:
        """Record a message with ``num_tokens`` tokens of a sample (0 in a message that only ends it)."""
        self._ended = now
        if not num_tokens:
            return
        if self._first is None:
            self._first = now
        else:
            self.gaps_s.append(now - self._last)
        self._last = now
        self.num_tokens += num_tokens
        if sample in self._samples:
            self.num_later += num_tokens
        self._samples.add(sample)

    @property
    def ttft_s(self) -> float:
        """Seconds until the first token; the whole time if there was none."""
        return (self._ended if self._first is None else self._first) - self.began

    @property
    def whole_s(self) -> float:
        """Seconds until the last message."""
        return self._ended - self.began

    @property
    def later_per_s(self) -> float | None:
        """Tokens per second after the first message; None if there were too few, or too fast to tell."""
        span = sum(self.gaps_s)
        return self.num_later / span if self.num_later and span >= RESOLUTION_S else None

    @property
    def per_s(self) -> float:
        """Tokens per second of the whole request, prompt included; 0 if it took no time."""
        return self.num_tokens / self.whole_s if self.whole_s > 0 else 0.0
