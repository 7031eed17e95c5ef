"""Drafting for samples, with as many drafts as are worth their rows in a step."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import Literal, Protocol

from ..api.sampling_params import Speculate
from .drafter import Drafter, ModelDrafter, Proposal
from .hold_rates import FORCED, MODEL, EngineRates, HoldRates
from .ngram_index import NGRAM, NgramIndex, TextIndex
from .recent_outputs import Histories, RecentOutputs
from .suffix import NgramDrafter, SuffixDrafter

_TRY_EVERY = 64  # steps between trials of drafts that seem too expensive, at first
_TRY_SELDOM = 4096  # maximum of steps between trials, while drafts stay too expensive
_TRY_TOKENS = 32  # tokens of a sample between trials of a draft model
_CHEAP = 0.1  # a trial assumes that a draft costs this share of a step of one sequence
_TRY_GAIN = 1.3  # factor by which a trial must raise tokens per second at that cost


class Grammar(Protocol):
    """Constraint on a sample's output."""

    def completed(self, drafts: Sequence[int], most: int) -> tuple[int, ...]:
        """Return ``drafts`` up to the first forbidden one, followed by tokens that the grammar forces; at
        most ``most``."""
        ...


class Drafting:
    """A sample's drafter, and the number of drafts that are worth their rows.

    Every proposal is compared with the next tokens, whether its drafts were computed or not. So the
    acceptance rate of a sample without computed drafts is also known, and the sample begins to draft again
    when that pays. A proposal is compared with all later tokens until the next proposal.

    A grammar filters the drafts, and extends them while it allows only one token.
    """

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
        """Begin a sample. ``recent`` records the output after ``num_prompt`` tokens, once it is ``finished``.
        ``engine``: acceptance rates of all samples."""
        self._num_prompt = num_prompt
        self._recent = recent
        self._drafter = drafter
        self._grammar = grammar
        self._most = most
        self._hold = HoldRates(engine)
        self._last = Proposal()
        self._num_tokens = 0  # number of tokens when the proposal was made

    def look(self, tokens: Sequence[int], room: int) -> float:
        """Search for drafts after ``tokens``, which at most ``room`` tokens may follow. Return the acceptance
        probability of the first draft; 0 without drafts. ``wish`` returns the drafts."""
        self._compare(tokens)
        most = min(self._most, room - 1)  # a token is sampled after the last draft in any case
        self._last = last = self._proposed(tokens, most) if most > 0 else Proposal()
        self._num_tokens = len(tokens)
        return self._hold[last.match] if last.tokens else 0.0

    def wish(self) -> tuple[tuple[int, ...], list[float]]:
        """Return the latest drafts, each with its acceptance probability, given that the one before it is
        accepted."""
        tokens, match = self._last
        return tuple(tokens), self._hold.of_run(match, len(tokens))

    def finished(self, tokens: Sequence[int]) -> None:
        """Add the tokens of the ended sample to the recent outputs."""
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
        """The drafter if it gets its drafts from a draft model; otherwise None."""
        return self._drafter if isinstance(self._drafter, ModelDrafter) else None

    def num_guesses(self, tokens: Sequence[int], room: int, *, cost: float, others: int = 0) -> int:
        """Return how many drafts a draft model should compute; call ``look`` next. ``cost``: as in
        ``num_drafts``, including the draft model's time. Now and then the result is 1 although no draft pays,
        because only computed drafts show the acceptance rate."""
        self._compare(tokens)
        most = min(self._most, room - 1)
        if most < 1:
            return 0
        worth = num_drafts(self._hold[MODEL], most=most, cost=cost, others=others)
        return worth or int(len(tokens) % _TRY_TOKENS == 0)

    def _compare(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens that were added since the last proposal."""
        if not self._last.tokens:
            return
        (drafts, match), self._last = self._last, Proposal()
        for draft, token in zip(drafts, tokens[self._num_tokens :], strict=False):
            self._hold.learn(match, draft == token)
            if draft != token:
                return
            match += 1


def num_drafts(hold: float, *, most: int, cost: float, others: int) -> int:
    """Return the number of drafts that gives the most tokens per second. Each draft is accepted with
    probability ``hold`` if the one before it is, and costs a share ``cost`` of the step. The result is 0 if
    the gain is negligible."""
    ratios = [(number, 1 + cost * number) for number in range(1, most + 1)]
    return allot([[hold] * most], 1 + others, ratios)[0]


Ratios = Sequence[tuple[int, float]]
"""Pairs (number of drafts, time of a step with so many drafts relative to a step without), ascending."""


class Drafted(Protocol):
    """A sequence that may have draft tokens; ``drafts``: those that the next step computes."""

    tokens: list[int]
    drafts: tuple[int, ...]


class Drafts(Protocol):
    """A sample that has not ended."""

    drafting: Drafting | None

    @property
    def sequence(self) -> Drafted: ...

    @property
    def room(self) -> int:
        """Number of tokens that the sample may still get."""
        ...


class StepTimes(Protocol):
    """Measured step times by number of sequences, each of which gets one token per step."""

    def ratios(self, num_sequences: int) -> Ratios:
        """Return numbers of drafts with relative step times; the same object until something is learned."""
        ...


class Speculation:
    """Drafting of one engine: gives each new sample a drafter, and decides which drafts a step computes.

    speculate   source of drafts for requests that do not choose one; "draft": a draft model
    most        largest number of drafts of a sequence in one step

    A search takes 4 to 31 us (``tests/bench/bench_drafting.py``). Samples search after every step, unless
    even drafts that are certain to be accepted would not pay.
    """

    def __init__(self, speculate: Speculate | Literal["draft"], *, most: int) -> None:
        self._speculate = speculate
        self._most = most
        self._histories = Histories()
        self._hold = EngineRates()
        self._untried = 0  # steps since drafts were computed
        self._try_every = _TRY_EVERY
        self._bounds: dict[int, tuple[Ratios, float]] = {}  # by number of sequences: smallest useful rate

    def begin(
        self,
        speculate: Speculate | None,
        grammars: Sequence[Grammar | None],
        *,
        num_prompt: int,
        owner: Hashable,
    ) -> list[Drafting | None]:
        """Return a drafter for each of a request's samples; None if the request does not draft.

        grammars     one for each sample
        num_prompt   tokens of the prompt, which is indexed once for all samples
        owner        owner of the recent outputs that suffix decoding searches and extends
        """
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
        """Set the drafts of the samples in ``drafting``; ``plain`` samples get a token from the next step."""
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
        """Set the drafts of the samples that found some; ``plain``: number of all samples in the step."""
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
            # The cost of a row is learned only from steps with drafts, so a cost estimated too high would
            # stay. Each failed trial doubles the time to the next, because the estimate may be right.
            cheap = [(number, 1 + _CHEAP / plain * number) for number, _ in ratios]
            counts = allot(wishes, plain, cheap, least=_TRY_GAIN)
            if any(counts):
                self._try_every = min(2 * self._try_every, _TRY_SELDOM)
        for (sequence, _), (drafts, _), count in zip(looked, proposals, counts, strict=True):
            if count:
                sequence.drafts = drafts[:count]

    def _bound(self, plain: int, times: Ratios) -> float:
        """Return the acceptance rate that the likeliest draft needs to be useful with ``plain`` sequences."""
        known = self._bounds.get(plain)
        if known is None or known[0] is not times:
            known = self._bounds[plain] = times, least_hold(plain, times)
        return known[1]


LEAST_GAIN = 1.08
"""Smallest factor by which drafts must raise the expected tokens per second to be computed. A smaller gain is
within the error of the estimated acceptance rates and costs."""


def allot(
    wishes: Sequence[Sequence[float]],
    plain: int,
    ratios: Sequence[tuple[int, float]],
    *,
    least: float = LEAST_GAIN,
) -> list[int]:
    """Return how many drafts of each sequence to compute; all 0 if the gain is negligible.

    wishes   for each sequence, the probability of each draft to be accepted if the one before it is
    plain    number of sequences that get a token from the step in any case
    ratios   ascending numbers of drafts, each with the step's relative time
    least    smallest factor of tokens per second that is worth drafts

    The drafts most likely to be accepted come first, whatever their sequence. One more draft is useful if it
    raises the step's expected tokens by a larger share than the step's time.
    """
    # The next draft of each sequence, the likeliest on top; later drafts of a sequence are less likely.
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
    """Return the smallest acceptance probability at which ``allot`` would choose any draft, if all drafts
    had the same probability."""
    return min((plain * (LEAST_GAIN * ratio - 1) / number for number, ratio in ratios), default=1.0)
