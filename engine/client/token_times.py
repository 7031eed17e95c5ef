from __future__ import annotations

from dataclasses import dataclass, field

RESOLUTION_S = 0.01
"""Spans shorter than this many seconds give no rate. A client process is not woken more precisely, and tokens
that already wait for it seem to arrive in no time."""


@dataclass(slots=True)
class TokenTimes:
    """Arrival times of the messages of one request. A message may contain several tokens."""

    began: float
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_later: int = 0
    _ended: float = 0.0
    _first: float | None = None
    _last: float = 0.0
    _samples: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._ended = self.began

    def add(self, now: float, num_tokens: int, sample: int = 0) -> None:
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
        return (self._ended if self._first is None else self._first) - self.began

    @property
    def whole_s(self) -> float:
        return self._ended - self.began

    @property
    def later_per_s(self) -> float | None:
        span = sum(self.gaps_s)
        return self.num_later / span if self.num_later and span >= RESOLUTION_S else None

    @property
    def per_s(self) -> float:
        return self.num_tokens / self.whole_s if self.whole_s > 0 else 0.0
