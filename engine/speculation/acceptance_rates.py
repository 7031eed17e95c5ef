"""Acceptance rates of drafts, by the length of the match that they were copied from."""

from __future__ import annotations

MODEL = 10**5
"""Match length of drafts from a draft model."""

FORCED = 10**6
"""Match length of tokens that a grammar forces."""

_BOUNDS = (4, 5, 6, 8, 16, MODEL, FORCED)  # smallest match lengths
_INITIAL_RATES = (0.2, 0.2, 0.3, 0.3, 0.5, 0.8, 0.5, 0.9)  # acceptance rates before any observation
_NUM_LENGTHS = 6
_SHORT = tuple(sum(match >= bound for bound in _BOUNDS) for match in range(_BOUNDS[4]))
_PRIOR = 2.0
_WINDOW = 20.0
_ENGINE_LEARNING_RATE = 0.02


def kind_of(match: int) -> int:
    return _SHORT[match] if match < len(_SHORT) else sum(match >= bound for bound in _BOUNDS)


class EngineRates:
    def __init__(self) -> None:
        self.rates: list[float] = list(_INITIAL_RATES)
        self._counts = [3.0] * len(_INITIAL_RATES)

    def learn(self, kind: int, accepted: bool) -> None:
        self._counts[kind] += 1
        self.rates[kind] += max(_ENGINE_LEARNING_RATE, 1 / self._counts[kind]) * (accepted - self.rates[kind])


class AcceptanceRates:
    """Acceptance rates of one sample, initialized from the engine's rates."""

    def __init__(self, engine: EngineRates | None = None) -> None:
        self._engine = engine or EngineRates()
        self._first = list(self._engine.rates)
        self._rates = list(self._first)
        self._seen = [0.0] * len(_INITIAL_RATES)
        self._accepted = [0.0] * len(_INITIAL_RATES)

    def __getitem__(self, match: int) -> float:
        return self._rates[kind_of(match)]

    def of_run(self, match: int, length: int) -> list[float]:
        """Return the acceptance probabilities of a proposal's drafts."""
        rates = self._rates
        return [rates[kind_of(each)] for each in range(match, match + length)]

    def learn(self, match: int, accepted: bool) -> None:
        kind = kind_of(match)
        self._engine.learn(kind, accepted)
        seen, rates = self._seen, self._rates
        kept = min(1.0, (_WINDOW - 1) / seen[kind]) if seen[kind] else 1.0
        seen[kind] = kept * seen[kind] + 1
        self._accepted[kind] = kept * self._accepted[kind] + accepted
        for each in range(kind, max(kind + 1, _NUM_LENGTHS)):
            before = self._first[each]
            if 0 < each < _NUM_LENGTHS:
                before = min(before, max(rates[each - 1], _INITIAL_RATES[each]))
            rates[each] = (self._accepted[each] + _PRIOR * before) / (seen[each] + _PRIOR)
