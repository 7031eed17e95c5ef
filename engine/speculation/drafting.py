"""Drafting of one sample, and the time spent on it."""

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

_TRY_EVERY = 64  # steps between trials of drafts that seem too expensive, at first
_TRY_SELDOM = 4096  # steps between trials in the end, if they stay too expensive
_TRY_TOKENS = 32  # tokens of a sample between trials of a draft model
_CHEAP = 0.1  # largest cost of a draft, as a share of a step of one sequence, if rows are cheap
_TRY_GAIN = 1.3  # factor in tokens per second that makes a trial worthwhile there
_LOOKING = 0.005  # share of step time that searches may take if no draft is accepted
_SAVED = 0.2  # steps: largest unspent share of that time
_GAINED = 5.0  # steps: largest unspent time that drafts have saved
_MOST_REST = 64  # steps: longest pause in searching before the budget is checked again
_OWED = 256  # steps: largest debt of a search
_FIRST_S = 1e-4  # seconds for searching before any step was timed


class Grammar(Protocol):
    """Constraint on a sample's output."""

    def completed(self, drafts: Sequence[int], most: int) -> tuple[int, ...]:
        """Return ``drafts`` up to the first forbidden one, followed by tokens that the grammar forces; at
        most ``most``."""
        ...


class Drafting:
    """A sample's drafter, and the number of drafts that are worth their rows.

    Every proposal is compared with the next tokens, whether it was computed or not. So the acceptance rate of
    a sample without computed drafts is also known, and it begins to draft again when that pays. A proposal
    that is not renewed at every token is compared with all later tokens.

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
        self.was_right = False  # whether the first draft of the last but one search was accepted
        self.always_looks = self.by_model is not None  # a draft model's drafts are always awaited

    def look(self, tokens: Sequence[int], room: int) -> float:
        """Search for drafts after ``tokens``, with space for ``room`` more tokens; return the acceptance
        probability of the first, 0 without drafts. The drafts: ``wish``."""
        self._compare(tokens)
        most = min(self._most, room - 1)  # a token is sampled after the last draft in any case
        self._last = last = self._proposed(tokens, most) if most > 0 else Proposal()
        self._num_tokens = len(tokens)
        return self._hold[last.match] if last.tokens else 0.0

    def wish(self) -> tuple[tuple[int, ...], list[float]]:
        """Return the latest drafts, each with its acceptance probability if the one before it is accepted."""
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
    def is_checked(self) -> bool:
        """Whether a grammar checks what is guessed, which takes many times as long as to guess."""
        return self._grammar is not None

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


class StepTimes(Protocol):
    """How long steps take that give so many sequences a token each."""

    def plain_s(self, num_sequences: int) -> float:
        """Seconds without drafts; 0 while that is not known."""
        ...

    def ratios(self, num_sequences: int) -> Ratios:
        """The same object, as long as nothing was learned."""
        ...


class Speculation:
    """An engine's: gives new samples what they draft by, and all of them their share of each step.

    speculate   for requests that do not say; "draft": a draft model
    most        drafts of a sequence in one step, at most
    clock       seconds, by which looking is held to its share of the steps' time

    A look takes some 10 us, whatever the model's step takes. So there is an account of time for looking:
    of every step a small share of its time goes in, and what drafts saved; looks are paid from it. No more
    than part of a step is saved up of the former, so that short answers lose no more than long ones. Where
    the account is empty the engine rests: no sample is asked, and nothing is indexed, for as many steps as
    it takes to pay for the next look. So most models look at every token, and the smallest ones now and
    then. Looks that found the next token do not count, if rows are cheap enough for drafts at all and no
    grammar has to check them: these are paid from what drafts save.
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
        self._left_s = _FIRST_S  # for looking
        self._spent_s = 0.0  # by the last look
        self._rest = 0  # steps that still pass without looking
        self._rested = 0  # steps that passed since samples were asked
        self.num_steps = 0  # that passed since samples were asked, if they were after the last one; else 0
        self._computed: list[tuple[Drafted, int]] = []  # the last step's that have drafts, and their tokens
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
        self._rest = 0
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

    def begin_step(self) -> bool:
        """Whether samples may be asked what follows the tokens of a step; called once for each. Where they
        are not asked, nobody has drafts."""
        self.num_steps = 0
        if self._rest:
            self._rest -= 1
            self._rested += 1
            return False
        return True

    def allot(self, drafting: Sequence[Drafts], plain: int, times: StepTimes) -> None:
        """Set the drafts of samples that draft, of ``plain`` in all that get a token from the next step."""
        self.num_steps, self._rested = 1 + self._rested, 0
        began, step_s = self._clock(), times.plain_s(plain)
        self._earn(step_s, plain, times)
        looks, always = self._left_s > 0, False
        self._untried += self.num_steps
        looked: list[tuple[Drafted, Drafting]] = []
        likeliest, num_right = 0.0, 0
        for sample in drafting:
            sequence, looker = sample.sequence, sample.drafting
            assert looker is not None
            sequence.drafts = ()
            always = always or looker.always_looks
            if looks or looker.always_looks:
                if hold := looker.look(sequence.tokens, sample.room):
                    looked.append((sequence, looker))
                    likeliest = max(likeliest, hold)
                num_right += looker.was_right and not looker.is_checked
        if looked:
            self._share_out(looked, likeliest, plain, times.ratios(plain))
        self._spent_s = self._clock() - began
        if looks:
            if num_right and self._bound(plain, times.ratios(plain)) >= 1:
                num_right = 0  # what is right gains nothing either
            in_vain = 1 - num_right / len(drafting)
            self._left_s -= in_vain * self._spent_s
        if self._left_s <= 0 and step_s and not self._computed and not always:
            self._rest = min(int(-self._left_s / (_LOOKING * step_s)), _MOST_REST)
            self._left_s = max(self._left_s, -_OWED * _LOOKING * step_s)

    def _earn(self, step_s: float, plain: int, times: StepTimes) -> None:
        """Put into the account what the steps since the last call earned, and what drafts gained in them."""
        left_s, most_s = self._left_s, _SAVED * step_s or _FIRST_S
        if left_s < most_s:
            left_s = min(left_s + _LOOKING * self.num_steps * step_s, most_s)
        if self._computed:
            num_drafts, num_held = 0, 0
            for sequence, num_tokens in self._computed:
                num_drafts += len(sequence.drafts)
                num_held += max(0, len(sequence.tokens) - num_tokens - 1)
            self._computed.clear()
            ratio = next((ratio for number, ratio in times.ratios(plain) if number >= num_drafts), 1.0)
            # Of tokens that were not looked for; what the step's own look took is paid for by itself.
            gained_s = (1 + num_held / plain) * (step_s - self._spent_s) - ratio * step_s + self._spent_s
            # What drafts lose is taken from what they gained before: a look now and then is always paid for.
            left_s = max(min(left_s + gained_s, max(left_s, _GAINED * step_s)), min(left_s, most_s))
        self._left_s = left_s

    def _share_out(
        self, looked: list[tuple[Drafted, Drafting]], likeliest: float, plain: int, ratios: Ratios
    ) -> None:
        """The drafts of those that found something, of ``plain`` samples in all."""
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
            # What a row costs is learned from steps that have some: without, an estimate once too high
            # stays. But the next time is later, for it may as well be right.
            cheap = [(number, 1 + _CHEAP / plain * number) for number, _ in ratios]
            counts = allot(wishes, plain, cheap, least=_TRY_GAIN)
            if any(counts):
                self._try_every = min(2 * self._try_every, _TRY_SELDOM)
        for (sequence, _), (drafts, _), count in zip(looked, proposals, counts, strict=True):
            if count:
                sequence.drafts = drafts[:count]
                self._computed.append((sequence, len(sequence.tokens)))

    def _bound(self, plain: int, times: Ratios) -> float:
        """What the likeliest draft must hold with, for anything to be gained beside ``plain`` sequences."""
        known = self._bounds.get(plain)
        if known is None or known[0] is not times:
            known = self._bounds[plain] = times, least_hold(plain, times)
        return known[1]
