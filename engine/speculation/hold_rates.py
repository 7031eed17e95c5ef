"""How often drafts hold, by how many tokens speak for them."""

from __future__ import annotations

MODEL = 10**5
"""A match as long as that: of what a model guessed."""

FORCED = 10**6
"""A match as long as that: of what a grammar leaves no choice about."""

_BOUNDS = (4, 5, 6, 8, 16, MODEL, FORCED)  # of the kinds of drafts, by what speaks for them
_HOLD = (0.2, 0.2, 0.3, 0.3, 0.5, 0.8, 0.5, 0.9)  # how often one of each kind holds, before any was compared
_NUM_LENGTHS = 6  # kinds, the first ones, that differ in the length of the match
_SHORT = tuple(sum(match >= bound for bound in _BOUNDS) for match in range(_BOUNDS[4]))  # kinds, by match
_PRIOR = 2.0  # drafts that what is believed beforehand counts for, with a sample
_MEMORY = 20.0  # of a sample, in drafts of a kind
_ENGINE_LEARNING = 0.02  # weight of the latest draft of any sample, in the end


def kind_of(match: int) -> int:
    """Of a draft that so many tokens before it speak for, drafts before it among them."""
    return _SHORT[match] if match < len(_SHORT) else sum(match >= bound for bound in _BOUNDS)


class EngineRates:
    """How often drafts of each kind held lately, if the one before did, of all samples."""

    def __init__(self) -> None:
        self.rates: list[float] = list(_HOLD)
        self._counts = [3.0] * len(_HOLD)

    def learn(self, kind: int, held: bool) -> None:
        self._counts[kind] += 1
        self.rates[kind] += max(_ENGINE_LEARNING, 1 / self._counts[kind]) * (held - self.rates[kind])


class HoldRates:
    """The same of one sample. It begins with its engine's: what is guessed well for one request mostly is for
    the next.

    A second draft is counted as a first one that a token more speaks for: if the first holds, that is what it
    is. So where names of four tokens repeat and what comes behind them does not, the fourth token is
    drafted after three, and nothing behind it.

    What was never seen of a long match is not believed to hold more often than what was seen of a shorter
    one, or than of a new engine's first sample: quotations of other requests say little about one whose
    matches are chance.
    """

    __slots__ = ("_engine", "_first", "_held", "_rates", "_seen")

    def __init__(self, engine: EngineRates | None = None) -> None:
        self._engine = engine or EngineRates()
        self._first = list(self._engine.rates)
        self._rates = list(self._first)
        self._seen = [0.0] * len(_HOLD)
        self._held = [0.0] * len(_HOLD)  # of those that were seen

    def __getitem__(self, match: int) -> float:
        return self._rates[kind_of(match)]

    def of_run(self, match: int, length: int) -> list[float]:
        """Of the drafts of a proposal of such a match."""
        rates = self._rates
        return [rates[kind_of(each)] for each in range(match, match + length)]

    def learn(self, match: int, held: bool) -> None:
        kind = kind_of(match)
        self._engine.learn(kind, held)
        seen, rates = self._seen, self._rates
        kept = min(1.0, (_MEMORY - 1) / seen[kind]) if seen[kind] else 1.0
        seen[kind] = kept * seen[kind] + 1
        self._held[kind] = kept * self._held[kind] + held
        for each in range(kind, max(kind + 1, _NUM_LENGTHS)):
            before = self._first[each]
            if 0 < each < _NUM_LENGTHS:
                before = min(before, max(rates[each - 1], _HOLD[each]))
            rates[each] = (self._held[each] + _PRIOR * before) / (seen[each] + _PRIOR)
