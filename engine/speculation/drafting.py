"""What one sample drafts, beside each of its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, Protocol

from ..api.sampling_params import Speculate
from .allotment import LEAST_GAIN, allot, least_hold
from .drafter import Drafter, Proposal
from .hold_rates import FORCED, MODEL, EngineRates, HoldRates
from .model_drafter import ModelDrafter
from .ngram import NgramDrafter
from .ngram_index import NGRAM, NgramIndex, TextIndex
from .recent_outputs import Histories, RecentOutputs
from .suffix import SuffixDrafter

_TRY_EVERY = 64  # steps: as often drafts are computed that seem to cost too much, at first
_TRY_SELDOM = 4096  # and at last, where they go on seeming so
_TRY_TOKENS = 32  # likewise, of a model's guesses: tokens of the sample
_CHEAP = 0.1  # a draft's share of a step of one sequence, where rows are cheap
_TRY_GAIN = 1.3  # times as many tokens per second that drafts make there which are worth trying
_LOOKING = 0.005  # share of an engine's time that looking may take where nothing is drafted
_SAVED_S = 1e-3  # of that time, what may be saved up or owed


class Grammar(Protocol):
    """What a sample's output must follow."""

    def completed(self, drafts: Sequence[int], most: int) -> tuple[int, ...]:
        """Those of ``drafts`` up to the first that may not come, and what must come after them; ``most`` at
        most."""
        ...


class Drafting:
    """A sample's drafter, and how many drafts are worth their rows.

    Every proposal is compared with the tokens that come, whether it was computed or not. So how often its
    drafts hold is known of a sample that computes none, for nothing, and it begins again where it pays.
    Where it does not look at every token, its proposal is compared with all that have come since.

    A grammar checks what the drafter says, and goes on where it leaves no choice.
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
        "always_looks",
        "was_right",
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
        """``recent`` remembers what was said after ``num_prompt`` tokens, once it is ``finished``.
        ``engine``: how often drafts of all samples held."""
        self._num_prompt = num_prompt
        self._recent = recent
        self._drafter = drafter
        self._grammar = grammar
        self._most = most
        self._hold = HoldRates(engine)
        self._last = Proposal()
        self._num_tokens = 0  # there were when it was made
        self.was_right = False  # the first guess of the look before the last one
        self.always_looks = grammar is not None or self.by_model is not None

    def look(self, tokens: Sequence[int], room: int) -> float:
        """Guess at what follows ``tokens``, of which ``room`` more may follow; return how likely the first
        guess holds, 0 if there is none. The guesses: ``wish``."""
        self._compare(tokens)
        most = min(self._most, room - 1)  # after the last guess a token is drawn in any case
        self._last = last = self._proposed(tokens, most) if most > 0 else Proposal()
        self._num_tokens = len(tokens)
        return self._hold[last.match] if last.tokens else 0.0

    def wish(self) -> tuple[tuple[int, ...], list[float]]:
        """What was guessed last, and how likely each holds if the one before it does."""
        tokens, match = self._last
        return tuple(tokens), self._hold.of_run(match, len(tokens))

    def finished(self, tokens: Sequence[int]) -> None:
        """The sample has ended, with these tokens."""
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
        """The drafter, where it needs to be given a draft model's guesses."""
        return self._drafter if isinstance(self._drafter, ModelDrafter) else None

    def num_guesses(self, tokens: Sequence[int], room: int, *, cost: float, others: int = 0) -> int:
        """How many guesses of a draft model are worth asking for; as ``look``, which is next, with the
        model's share in ``cost``. Now and then one, for guesses that nobody makes teach nothing."""
        self._compare(tokens)
        most = min(self._most, room - 1)
        if most < 1:
            return 0
        worth = num_drafts(self._hold[MODEL], most=most, cost=cost, others=others)
        return worth or int(len(tokens) % _TRY_TOKENS == 0)

    def _compare(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens that have come since the last proposal."""
        self.was_right = False
        if not self._last.tokens:
            return
        (drafts, match), self._last = self._last, Proposal()
        for draft, token in zip(drafts, tokens[self._num_tokens :], strict=False):
            self._hold.learn(match, draft == token)
            if draft != token:
                return
            self.was_right = True
            match += 1


def num_drafts(hold: float, *, most: int, cost: float, others: int) -> int:
    """How many drafts make the most tokens of a step's time, where each holds with probability ``hold`` if
    the one before it does, and costs a share ``cost`` of the step; 0 if that is hardly more than none."""
    tokens = plain = 1.0 + others
    best, count, holds = LEAST_GAIN * plain, 0, 1.0
    for number in range(1, most + 1):
        holds *= hold
        tokens += holds
        if (rate := tokens / (1 + cost * number)) > best:
            best, count = rate, number
    return count


Ratios = Sequence[tuple[int, float]]
"""Numbers of drafts, rising, and how many times as long a step with so many takes."""


class Drafted(Protocol):
    """What a sequence may have guessed: in ``drafts``, those that the next step shall compute."""

    tokens: list[int]
    drafts: tuple[int, ...]


class Drafts(Protocol):
    """A sample that goes on."""

    drafting: Drafting | None

    @property
    def sequence(self) -> Drafted: ...

    @property
    def room(self) -> int:
        """Tokens that may follow."""
        ...


class Speculation:
    """An engine's: gives new samples what they draft by, and all of them their share of each step.

    speculate   for requests that do not say; "draft": a draft model
    most        drafts of a sequence in one step, at most
    clock       seconds, by which looking is held to its share of the engine's time

    A look takes some 20 us, whatever the model's step takes. So samples look while that is within a small
    share of the time that passes: at every token of most models, now and then of the smallest ones. Looks
    that found the next token do not count, if rows are cheap enough for drafts at all, and where drafts are
    worth computing what was spent is forgotten.
    """

    def __init__(
        self,
        speculate: Speculate | Literal["draft"],
        *,
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._speculate = speculate
        self._most = most
        self._clock = clock
        self._looked_at = clock()
        self._left_s = _SAVED_S  # for looking
        self._histories = Histories()
        self._hold = EngineRates()
        self._untried = 0  # steps since drafts were computed
        self._try_every = _TRY_EVERY
        self._bounds: dict[int, tuple[Ratios, float]] = {}  # by sequences: what holds less gains nothing

    def begin(
        self,
        speculate: Speculate | None,
        grammars: Sequence[Grammar | None],
        *,
        num_prompt: int,
        owner: Hashable,
    ) -> list[Drafting | None]:
        """For each of a request's samples; None if it does not draft.

        grammars     one for each sample
        num_prompt   tokens of the prompt, which is indexed once for all
        owner        whose outputs drafts may be taken from, and taken into
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

    def allot(self, drafting: Sequence[Drafts], plain: int, ratios: Callable[[int], Ratios]) -> None:
        """Set the drafts of samples that draft, of ``plain`` in all that get a token from the next step.

        ratios   of sequences: see ``DraftTimes.ratios``
        """
        began = self._clock()
        earned_s, self._looked_at = _LOOKING * (began - self._looked_at), began
        self._left_s = min(self._left_s + earned_s, _SAVED_S)
        looks = self._left_s > 0
        self._untried += 1
        looked: list[tuple[Drafted, Drafting]] = []
        likeliest, num_right = 0.0, 0
        for sample in drafting:
            sequence, looker = sample.sequence, sample.drafting
            assert looker is not None
            sequence.drafts = ()
            if looks or looker.always_looks:
                if hold := looker.look(sequence.tokens, sample.room):
                    looked.append((sequence, looker))
                    likeliest = max(likeliest, hold)
                num_right += looker.was_right
        if looked:
            self._share_out(looked, likeliest, plain, ratios)
        if looks:
            if num_right and self._bound(plain, ratios(plain)) >= 1:
                num_right = 0  # what is right gains nothing either
            in_vain = 1 - num_right / len(drafting)
            self._left_s = max(self._left_s - in_vain * (self._clock() - began), -_SAVED_S)

    def _share_out(
        self,
        looked: list[tuple[Drafted, Drafting]],
        likeliest: float,
        plain: int,
        ratios: Callable[[int], Ratios],
    ) -> None:
        """The drafts of those that found something, of ``plain`` samples in all."""
        times = ratios(plain)
        tries = self._untried >= self._try_every
        counts = [0] * len(looked)
        if tries or likeliest >= self._bound(plain, times):
            proposals = [drafting.wish() for _, drafting in looked]
            wishes = [holds for _, holds in proposals]
            counts = allot(wishes, plain, times)
            if any(counts):
                self._untried, self._try_every, self._left_s = 0, _TRY_EVERY, _SAVED_S
            elif tries:
                self._untried = 0
                # What a row costs is learned from steps that have some: without, an estimate once too high
                # stays. But the next time is later, for it may as well be right.
                cheap = [(number, 1 + _CHEAP / plain * number) for number, _ in times]
                counts = allot(wishes, plain, cheap, least=_TRY_GAIN)
                if any(counts):
                    self._try_every = min(2 * self._try_every, _TRY_SELDOM)
            for (sequence, _), (drafts, _), count in zip(looked, proposals, counts, strict=True):
                sequence.drafts = drafts[:count]

    def _bound(self, plain: int, times: Ratios) -> float:
        """What the likeliest draft must hold with, for anything to be gained beside ``plain`` sequences."""
        known = self._bounds.get(plain)
        if known is None or known[0] is not times:
            known = self._bounds[plain] = times, least_hold(plain, times)
        return known[1]
