"""Times at which the tokens of a request reached its client."""

from __future__ import annotations

from dataclasses import dataclass, field

RESOLUTION_S = 0.01
"""Tokens that came within less give no rate: a client's process is not woken more exactly, and what it finds
waiting then has come in no time."""


@dataclass(slots=True)
class TokenTimes:
    """Times of the messages of one request: a message may bring several tokens, and a first one that is read
    late brings those that were ready long before. So what comes with a sample's first message has no time of
    its own, and a message is one gap, however many tokens it has.

    began       when the request was sent: a reading of the clock that ``add`` is given readings of
    gaps_s      between messages with tokens
    num_later   tokens that came after the first message of their sample
    """

    began: float
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_later: int = 0
    _ended: float = 0.0
    _first: float | None = None
    _last: float = 0.0
    _samples: set[int] = field(default_factory=set)  # that have begun

    def __post_init__(self) -> None:
        self._ended = self.began

    def add(self, now: float, num_tokens: int, sample: int = 0) -> None:
        """A message came, with so many tokens of a sample: perhaps none, but an end."""
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
        """Until the first token; the whole time if there was none."""
        return (self._ended if self._first is None else self._first) - self.began

    @property
    def whole_s(self) -> float:
        """Until the last message."""
        return self._ended - self.began

    @property
    def later_per_s(self) -> float | None:
        """Tokens per second after the first message; None if too few came too fast to say."""
        span = sum(self.gaps_s)
        return self.num_later / span if self.num_later and span >= RESOLUTION_S else None

    @property
    def per_s(self) -> float:
        """Tokens per second of the whole request, its prompt included; 0 for one that took no time."""
        return self.num_tokens / self.whole_s if self.whole_s > 0 else 0.0
