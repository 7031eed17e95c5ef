"""What one sample drafts, beside each of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal, Protocol

from ..api.sampling_params import Speculate
from .allotment import LEAST_GAIN, allot
from .drafter import Drafter, Proposal
from .model_drafter import MATCH, ModelDrafter
from .ngram import NgramDrafter
from .ngram_index import NGRAM, NgramIndex, TextIndex
from .recent_outputs import Histories, RecentOutputs
from .suffix import SuffixDrafter

FORCED = 10**6
"""A match as long as that: of what a grammar leaves no choice about."""

_MATCHES = (4, 8, 16, FORCED)  # bounds of the kinds of proposals, by what speaks for them
_HOLD = (0.2, 0.3, 0.5, 0.8, 0.9)  # how often a draft of each kind holds, before any was compared
_PRIOR = 3.0  # drafts that what the engine knows counts for, with a new sample
_LEARNING = 0.05  # weight of a sample's latest draft, in the end
_ENGINE_LEARNING = 0.02  # likewise, of an engine's
_TRY_EVERY = 64  # steps: as often drafts are computed that seem to cost too much
_TRY_TOKENS = 32  # likewise, of a model's guesses: tokens of the sample
_CHEAP = 0.1  # a draft's share of a step of one sequence, where rows are cheap
_TRY_GAIN = 1.1  # times as many tokens per second that drafts make there which are worth trying


class HoldRates:
    """How often drafts of each kind held lately, if the one before did. A sample's begin with its engine's:
    what is guessed well for one request mostly is for the next."""

    __slots__ = ("_counts", "_engine", "_rates")

    def __init__(self, engine: HoldRates | None = None) -> None:
        self._engine = engine
        self._rates: list[float] = list(_HOLD) if engine is None else list(engine._rates)
        self._counts = [_PRIOR] * len(_HOLD)

    def __getitem__(self, kind: int) -> float:
        return self._rates[kind]

    def learn(self, kind: int, held: bool) -> None:
        self._counts[kind] += 1
        least = _ENGINE_LEARNING if self._engine is None else _LEARNING
        self._rates[kind] += max(least, 1 / self._counts[kind]) * (held - self._rates[kind])
        if self._engine is not None:
            self._engine.learn(kind, held)


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

    A grammar checks what the drafter says, and goes on where it leaves no choice.
    """

    __slots__ = ("_drafter", "_grammar", "_hold", "_last", "_most", "_num_prompt", "_num_tokens", "_recent")

    def __init__(
        self,
        drafter: Drafter,
        *,
        most: int,
        engine: HoldRates | None = None,
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
        self._hold = HoldRates(engine or HoldRates())
        self._last = Proposal()
        self._num_tokens = 0  # there were when it was made

    def propose(self, tokens: Sequence[int], room: int) -> tuple[tuple[int, ...], float]:
        """Guesses at what follows ``tokens``, of which ``room`` more may follow; and how likely each holds if
        the one before it does."""
        self._compare(tokens)
        most = min(self._most, room - 1)  # after the last guess a token is drawn in any case
        self._last = self._proposed(tokens, most) if most > 0 else Proposal()
        self._num_tokens = len(tokens)
        if not self._last.tokens:
            return (), 0.0
        return tuple(self._last.tokens), self._hold[_kind(self._last)]

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
        """How many guesses of a draft model are worth asking for; as ``propose``, which is next, with the
        model's share in ``cost``. Now and then one, for guesses that nobody makes teach nothing."""
        self._compare(tokens)
        most = min(self._most, room - 1)
        if most < 1:
            return 0
        worth = num_drafts(self._hold[_kind(Proposal((), MATCH))], most=most, cost=cost, others=others)
        return worth or int(len(tokens) % _TRY_TOKENS == 0)

    def _compare(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens that have come since the last proposal."""
        if not self._last.tokens:
            return
        kind = _kind(self._last)
        last, self._last = self._last, Proposal()
        for draft, token in zip(last.tokens, tokens[self._num_tokens :], strict=False):
            self._hold.learn(kind, draft == token)
            if draft != token:
                break


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
    """

    def __init__(self, speculate: Speculate | Literal["draft"], *, most: int) -> None:
        self._speculate = speculate
        self._most = most
        self._histories = Histories()
        self._hold = HoldRates()
        self._num_steps = 0  # that had drafts to choose from

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

    def allot(
        self, going_on: Sequence[Drafts], ratios: Callable[[int, int], Sequence[tuple[int, float]]]
    ) -> None:
        """Set the drafts of all samples that get a token from the next step.

        ratios   of sequences and the most drafts: see ``DraftTimes.ratios``
        """
        proposals: list[tuple[Drafted, tuple[int, ...]]] = []
        wishes: list[tuple[float, int]] = []
        most = 0
        for sample in going_on:
            sequence = sample.sequence
            sequence.drafts = ()
            if sample.drafting is None:
                continue
            drafts, hold = sample.drafting.propose(sequence.tokens, sample.room)
            if drafts:
                proposals.append((sequence, drafts))
                wishes.append((hold, len(drafts)))
                most += len(drafts)
        if not most:
            return
        plain = len(going_on)
        times = ratios(plain, most)
        counts = allot(wishes, plain, times)
        self._num_steps += 1
        if self._num_steps % _TRY_EVERY == 0 and not any(counts):
            # What a row costs is learned from steps that have some: without, an estimate once too high stays.
            cheap = [(number, 1 + _CHEAP / plain * number) for number, _ in times]
            counts = allot(wishes, plain, cheap, least=_TRY_GAIN)
        for (sequence, drafts), count in zip(proposals, counts, strict=True):
            sequence.drafts = drafts[:count]


def _kind(proposal: Proposal) -> int:
    return sum(proposal.match >= bound for bound in _MATCHES)
