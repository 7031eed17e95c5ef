"""Drafting for samples, and the choice of the number of drafts per step."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import Literal, Protocol

from octavo.scheduler import Sequence as Served

from ..api.config import MAX_DRAFTS
from ..api.sampling_params import Speculate
from .acceptance_rates import FORCED, MODEL, AcceptanceRates, EngineRates
from .drafter import Drafter, ModelDrafter, Proposal
from .ngram_index import NGRAM, NgramIndex, TextIndex
from .recent_outputs import Histories, RecentOutputs
from .suffix import NgramDrafter, SuffixDrafter

_TRY_EVERY = 64  # steps between trials of drafts, at first
_TRY_SELDOM = 4096  # steps between trials of drafts, at most
_TRY_TOKENS = 32  # tokens of one sequence between trials of the draft model
_CHEAP = 0.1
_TRY_GAIN = 1.3


class Grammar(Protocol):
    def completed(self, drafts: Sequence[int], max_drafts: int) -> tuple[int, ...]:
        """Return ``drafts`` up to the first forbidden token, and then forced tokens."""
        ...


class Drafting:
    def __init__(
        self,
        drafter: Drafter,
        *,
        max_drafts: int,
        engine: EngineRates | None = None,
        grammar: Grammar | None = None,
        num_prompt: int = 0,
        recent: RecentOutputs | None = None,
    ) -> None:
        self.drafts: tuple[int, ...] = ()
        self._num_prompt = num_prompt
        self._recent = recent
        self._drafter = drafter
        self._grammar = grammar
        self._max_drafts = max_drafts
        self._acceptance = AcceptanceRates(engine)
        self._last = Proposal()
        self._num_tokens = 0

    def search(self, tokens: Sequence[int], tokens_left: int) -> float:
        """Search for drafts; return the acceptance probability of the first draft."""
        self._compare(tokens)
        max_drafts = min(self._max_drafts, tokens_left - 1)
        self._last = last = self._proposed(tokens, max_drafts) if max_drafts > 0 else Proposal()
        self._num_tokens = len(tokens)
        return self._acceptance[last.match] if last.tokens else 0.0

    def rated_drafts(self) -> tuple[tuple[int, ...], list[float]]:
        """Return the latest drafts with their acceptance probabilities."""
        tokens, match = self._last
        return tuple(tokens), self._acceptance.of_run(match, len(tokens))

    def finished(self, tokens: Sequence[int]) -> None:
        if self._recent is not None:
            self._recent.add(tokens[max(0, self._num_prompt - NGRAM) :])

    def _proposed(self, tokens: Sequence[int], max_drafts: int) -> Proposal:
        proposal = self._drafter.propose(tokens, max_drafts)
        if self._grammar is None:
            return proposal
        drafts = self._grammar.completed(proposal.tokens, max_drafts)
        is_proposed = bool(drafts) and bool(proposal.tokens) and drafts[0] == proposal.tokens[0]
        return Proposal(drafts, proposal.match if is_proposed else FORCED)

    @property
    def by_model(self) -> ModelDrafter | None:
        return self._drafter if isinstance(self._drafter, ModelDrafter) else None

    def num_model_drafts(
        self, tokens: Sequence[int], tokens_left: int, *, cost: float, others: int = 0
    ) -> int:
        self._compare(tokens)
        max_drafts = min(self._max_drafts, tokens_left - 1)
        if max_drafts < 1:
            return 0
        worth = num_drafts(self._acceptance[MODEL], max_drafts=max_drafts, cost=cost, others=others)
        return worth or int(len(tokens) % _TRY_TOKENS == 0)

    def _compare(self, tokens: Sequence[int]) -> None:
        if not self._last.tokens:
            return
        (drafts, match), self._last = self._last, Proposal()
        for draft, token in zip(drafts, tokens[self._num_tokens :], strict=False):
            self._acceptance.learn(match, draft == token)
            if draft != token:
                return
            match += 1


def num_drafts(acceptance: float, *, max_drafts: int, cost: float, others: int) -> int:
    """Return the number of drafts that gives the most tokens per second.

    acceptance   acceptance probability of a draft
    cost   time of a draft, relative to the step
    """
    ratios = [(number, 1 + cost * number) for number in range(1, max_drafts + 1)]
    return allocate([[acceptance] * max_drafts], 1 + others, ratios)[0]


Ratios = Sequence[tuple[int, float]]
"""Ascending pairs (number of drafts, relative step time)."""


class Drafts(Protocol):
    drafting: Drafting | None

    @property
    def sequence(self) -> Served: ...

    @property
    def tokens_left(self) -> int: ...


class Speculation:
    def __init__(self, speculate: Speculate | Literal["draft"], *, max_drafts: int = MAX_DRAFTS) -> None:
        self._speculate = speculate
        self._max_drafts = max_drafts
        self._histories = Histories()
        self._acceptance = EngineRates()
        self._steps_since_trial = 0
        self._try_every = _TRY_EVERY

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
        drafters: list[Drafting | None] = []
        for grammar in grammars:
            index = TextIndex(prompt, num_prompt)
            drafter: Drafter
            if drafts_by == "draft":
                drafter = ModelDrafter()
            else:
                drafter = NgramDrafter(index) if recent is None else SuffixDrafter(index, recent)
            drafters.append(
                Drafting(
                    drafter,
                    max_drafts=self._max_drafts,
                    engine=self._acceptance,
                    grammar=grammar,
                    num_prompt=num_prompt,
                    recent=recent,
                )
            )
        return drafters

    def allocate(self, drafting: Sequence[Drafts], plain: int, ratios: Ratios) -> None:
        self._steps_since_trial += 1
        may_gain = self._steps_since_trial >= self._try_every or min_acceptance(plain, ratios) < 1
        found: list[Drafting] = []
        best = 0.0
        for sample in drafting:
            looker = sample.drafting
            assert looker is not None
            looker.drafts = ()
            if (may_gain or looker.by_model is not None) and (
                acceptance := looker.search(sample.sequence.tokens, sample.tokens_left)
            ):
                found.append(looker)
                best = max(best, acceptance)
        if found:
            self._allocate(found, best, plain, ratios)

    def _allocate(self, found: list[Drafting], best: float, plain: int, ratios: Ratios) -> None:
        tries = self._steps_since_trial >= self._try_every
        if not tries and best < min_acceptance(plain, ratios):
            return
        proposals = [drafting.rated_drafts() for drafting in found]
        acceptances = [rates for _, rates in proposals]
        counts = allocate(acceptances, plain, ratios)
        if any(counts):
            self._steps_since_trial, self._try_every = 0, _TRY_EVERY
        elif tries:
            self._steps_since_trial = 0
            cheap = [(number, 1 + _CHEAP / plain * number) for number, _ in ratios]
            counts = allocate(acceptances, plain, cheap, least=_TRY_GAIN)
            if any(counts):
                self._try_every = min(2 * self._try_every, _TRY_SELDOM)
        for drafting, (drafts, _), count in zip(found, proposals, counts, strict=True):
            if count:
                drafting.drafts = drafts[:count]


MIN_GAIN = 1.08
"""Smallest speed-up that justifies drafts."""


def allocate(
    acceptances: Sequence[Sequence[float]],
    plain: int,
    ratios: Sequence[tuple[int, float]],
    *,
    least: float = MIN_GAIN,
) -> list[int]:
    """Return the number of drafts to compute for each sequence.

    ``acceptances`` are the acceptance probabilities of each sequence's drafts.
    """
    heap = [(-rates[0], index, 1) for index, rates in enumerate(acceptances) if rates and rates[0] > 0]
    heapq.heapify(heap)
    order: list[int] = []
    tokens = float(plain)
    best, count = least * plain, 0
    for number, ratio in ratios:
        while heap and len(order) < number:
            likely, index, rank = heap[0]
            tokens -= likely
            order.append(index)
            rates = acceptances[index]
            if rank < len(rates):
                heapq.heapreplace(heap, (likely * rates[rank], index, rank + 1))
            else:
                heapq.heappop(heap)
        if len(order) < number:
            break
        if tokens / ratio > best:
            best, count = tokens / ratio, number
    counts = [0] * len(acceptances)
    for index in order[:count]:
        counts[index] += 1
    return counts


def min_acceptance(plain: int, ratios: Sequence[tuple[int, float]]) -> float:
    return min((plain * (MIN_GAIN * ratio - 1) / number for number, ratio in ratios), default=1.0)
