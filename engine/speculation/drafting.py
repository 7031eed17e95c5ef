"""Drafting for samples, and the choice of the number of drafts per step."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import Literal, Protocol

from ..api.config import MAX_DRAFTS
from ..api.sampling_params import Speculate
from .drafter import Drafter, ModelDrafter, Proposal
from .hold_rates import FORCED, MODEL, EngineRates, HoldRates
from .ngram_index import NGRAM, NgramIndex, TextIndex
from .recent_outputs import Histories, RecentOutputs
from .suffix import NgramDrafter, SuffixDrafter

_TRY_EVERY = 64  # steps between trials of drafts, at first
_TRY_SELDOM = 4096  # steps between trials of drafts, at most
_TRY_TOKENS = 32  # tokens of one sequence between trials of the draft model
_CHEAP = 0.1
_TRY_GAIN = 1.3


class Grammar(Protocol):
    def completed(self, drafts: Sequence[int], most: int) -> tuple[int, ...]:
        """Return ``drafts`` up to the first forbidden token, and then forced tokens."""
        ...


class Drafting:
    __slots__ = (
        "_drafter",
        "_grammar",
        "_hold",
        "_last",
        "_most",
        "_num_prompt",
        "_num_tokens",
        "_recent",
    )

    def __init__(
        self,
        drafter: Drafter,
        *,
        most: int,
        engine: EngineRates | None = None,
        grammar: Grammar | None = None,
        num_prompt: int = 0,
        recent: RecentOutputs | None = None,
    ) -> None:
        self._num_prompt = num_prompt
        self._recent = recent
        self._drafter = drafter
        self._grammar = grammar
        self._most = most
        self._hold = HoldRates(engine)
        self._last = Proposal()
        self._num_tokens = 0

    def look(self, tokens: Sequence[int], room: int) -> float:
        """Search for drafts; return the acceptance probability of the first draft."""
        self._compare(tokens)
        most = min(self._most, room - 1)
        self._last = last = self._proposed(tokens, most) if most > 0 else Proposal()
        self._num_tokens = len(tokens)
        return self._hold[last.match] if last.tokens else 0.0

    def wish(self) -> tuple[tuple[int, ...], list[float]]:
        """Return the latest drafts with their acceptance probabilities."""
        tokens, match = self._last
        return tuple(tokens), self._hold.of_run(match, len(tokens))

    def finished(self, tokens: Sequence[int]) -> None:
        if self._recent is not None:
            self._recent.add(tokens[max(0, self._num_prompt - NGRAM) :])

    def _proposed(self, tokens: Sequence[int], most: int) -> Proposal:
        proposal = self._drafter.propose(tokens, most)
        if self._grammar is None:
            return proposal
        drafts = self._grammar.completed(proposal.tokens, most)
        guessed = bool(drafts) and bool(proposal.tokens) and drafts[0] == proposal.tokens[0]
        return Proposal(drafts, proposal.match if guessed else FORCED)

    @property
    def by_model(self) -> ModelDrafter | None:
        return self._drafter if isinstance(self._drafter, ModelDrafter) else None

    def num_guesses(self, tokens: Sequence[int], room: int, *, cost: float, others: int = 0) -> int:
        self._compare(tokens)
        most = min(self._most, room - 1)
        if most < 1:
            return 0
        worth = num_drafts(self._hold[MODEL], most=most, cost=cost, others=others)
        return worth or int(len(tokens) % _TRY_TOKENS == 0)

    def _compare(self, tokens: Sequence[int]) -> None:
        if not self._last.tokens:
            return
        (drafts, match), self._last = self._last, Proposal()
        for draft, token in zip(drafts, tokens[self._num_tokens :], strict=False):
            self._hold.learn(match, draft == token)
            if draft != token:
                return
            match += 1


def num_drafts(hold: float, *, most: int, cost: float, others: int) -> int:
    """Return the number of drafts that gives the most tokens per second.

    hold   acceptance probability of a draft
    cost   time of a draft, relative to the step
    """
    ratios = [(number, 1 + cost * number) for number in range(1, most + 1)]
    return allot([[hold] * most], 1 + others, ratios)[0]


Ratios = Sequence[tuple[int, float]]
"""Ascending pairs (number of drafts, relative step time)."""


class Drafted(Protocol):
    tokens: list[int]
    drafts: tuple[int, ...]


class Drafts(Protocol):
    drafting: Drafting | None

    @property
    def sequence(self) -> Drafted: ...

    @property
    def room(self) -> int: ...


class StepTimes(Protocol):
    def ratios(self, num_sequences: int) -> Ratios: ...


class Speculation:
    def __init__(self, speculate: Speculate | Literal["draft"], *, most: int = MAX_DRAFTS) -> None:
        self._speculate = speculate
        self._most = most
        self._histories = Histories()
        self._hold = EngineRates()
        self._untried = 0
        self._try_every = _TRY_EVERY
        self._bounds: dict[int, tuple[Ratios, float]] = {}

    def begin(
        self,
        speculate: Speculate | None,
        grammars: Sequence[Grammar | None],
        *,
        num_prompt: int,
        owner: Hashable,
    ) -> list[Drafting | None]:
        """Return a drafter for each of a request's samples, if the request drafts."""
        drafts_by = speculate or self._speculate
        if drafts_by == "off":
            return [None] * len(grammars)
        recent = self._histories.of(owner) if drafts_by == "suffix" else None
        prompt = NgramIndex()
        made: list[Drafting | None] = []
        for grammar in grammars:
            index = TextIndex(prompt, num_prompt)
            drafter: Drafter
            if drafts_by == "draft":
                drafter = ModelDrafter()
            else:
                drafter = NgramDrafter(index) if recent is None else SuffixDrafter(index, recent)
            made.append(
                Drafting(
                    drafter,
                    most=self._most,
                    engine=self._hold,
                    grammar=grammar,
                    num_prompt=num_prompt,
                    recent=recent,
                )
            )
        return made

    def allot(self, drafting: Sequence[Drafts], plain: int, times: StepTimes) -> None:
        self._untried += 1
        ratios = times.ratios(plain)
        may_gain = self._untried >= self._try_every or self._bound(plain, ratios) < 1
        looked: list[tuple[Drafted, Drafting]] = []
        likeliest = 0.0
        for sample in drafting:
            sequence, looker = sample.sequence, sample.drafting
            assert looker is not None
            sequence.drafts = ()
            if (may_gain or looker.by_model is not None) and (
                hold := looker.look(sequence.tokens, sample.room)
            ):
                looked.append((sequence, looker))
                likeliest = max(likeliest, hold)
        if looked:
            self._share_out(looked, likeliest, plain, ratios)

    def _share_out(
        self, looked: list[tuple[Drafted, Drafting]], likeliest: float, plain: int, ratios: Ratios
    ) -> None:
        tries = self._untried >= self._try_every
        if not tries and likeliest < self._bound(plain, ratios):
            return
        proposals = [drafting.wish() for _, drafting in looked]
        wishes = [holds for _, holds in proposals]
        counts = allot(wishes, plain, ratios)
        if any(counts):
            self._untried, self._try_every = 0, _TRY_EVERY
        elif tries:
            self._untried = 0
            cheap = [(number, 1 + _CHEAP / plain * number) for number, _ in ratios]
            counts = allot(wishes, plain, cheap, least=_TRY_GAIN)
            if any(counts):
                self._try_every = min(2 * self._try_every, _TRY_SELDOM)
        for (sequence, _), (drafts, _), count in zip(looked, proposals, counts, strict=True):
            if count:
                sequence.drafts = drafts[:count]

    def _bound(self, plain: int, times: Ratios) -> float:
        known = self._bounds.get(plain)
        if known is None or known[0] is not times:
            known = self._bounds[plain] = times, least_hold(plain, times)
        return known[1]


LEAST_GAIN = 1.08
"""Smallest speed-up that justifies drafts."""


def allot(
    wishes: Sequence[Sequence[float]],
    plain: int,
    ratios: Sequence[tuple[int, float]],
    *,
    least: float = LEAST_GAIN,
) -> list[int]:
    """Return the number of drafts to compute for each sequence.

    ``wishes`` are the acceptance probabilities of each sequence's drafts.
    """
    heap = [(-holds[0], index, 1) for index, holds in enumerate(wishes) if holds and holds[0] > 0]
    heapq.heapify(heap)
    order: list[int] = []
    tokens = float(plain)
    best, count = least * plain, 0
    for number, ratio in ratios:
        while heap and len(order) < number:
            likely, index, rank = heap[0]
            tokens -= likely
            order.append(index)
            holds = wishes[index]
            if rank < len(holds):
                heapq.heapreplace(heap, (likely * holds[rank], index, rank + 1))
            else:
                heapq.heappop(heap)
        if len(order) < number:
            break
        if tokens / ratio > best:
            best, count = tokens / ratio, number
    counts = [0] * len(wishes)
    for index in order[:count]:
        counts[index] += 1
    return counts


def least_hold(plain: int, ratios: Sequence[tuple[int, float]]) -> float:
    return min((plain * (LEAST_GAIN * ratio - 1) / number for number, ratio in ratios), default=1.0)
