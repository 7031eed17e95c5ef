"""What the scheduler speaks about: sequences, the work of one step, and its results."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

from octavo.block_manager import Digest, Miss, PageCopy, PageTable


class Status(enum.Enum):
    """Where a sequence stands."""

    WAITING_FOR_PAGES = enum.auto()  # a connector brings some of its prompt
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class LatencyGoal(NamedTuple):
    """When a request wants its tokens.

    target_itl      seconds between two of them (None: whatever others want)
    first_token_by  when the first one is wanted, by the clock of ``Scheduler.plan`` (None: whenever)
    """

    target_itl: float | None = None
    first_token_by: float | None = None


ANY_TIME = LatencyGoal()


@dataclass(slots=True, eq=False)
class History:
    """What the scheduler remembers of a sequence whether or not it runs.

    A parallel sample that takes a sequence's place takes over its history.

    num_cached   prompt tokens found in the prefix cache at first admission (a parallel sample's: its
                 parent's); None before
    num_preempted  how often it had to give its pages back
    num_admitted_before  sequences that had been let in when it was, for the first time
    num_overtaken  how many others were let in before it while it was next, see ``AgeOrder``
    num_charged  tokens that the tenant has paid for, where accounts are kept
    may_load     it gave its pages back, and no connector was asked for them since
    digests      of the leading full pages, as far as known
    """

    num_cached: int | None = None
    num_preempted: int = 0
    num_admitted_before: int = 0
    num_overtaken: int = 0
    num_charged: int = 0
    may_load: bool = False
    digests: list[Digest] = field(default_factory=list)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One token stream being served.

    ``tokens`` may run ahead of the K/V in memory; the scheduler's whole job is to let ``num_written`` catch
    up with ``len(tokens)``.

    max_tokens   tokens to generate at most
    max_length   tokens of the prompt and these
    priority     smaller numbers are let in first, and give their pages up last
    salt         pages are shared only with sequences of the same salt
    parallel_samples  sequences with the same prompt (n > 1) that wait for their parent's, this one: at
                 its first sample they are forked from it and get a token each
    skip_prefix_cache  never start from cached pages: somebody wants to see the whole prompt computed
    tenant       whose it is, where several share a server
    drafts       guesses at what follows ``tokens``, computed beside the last of these where there is
                 room: whoever appends a token says what they are now
    """

    sequence_id: str
    tokens: list[int]
    max_tokens: InitVar[int]
    salt: bytes = b""
    priority: int = 0
    parallel_samples: list[Sequence] = field(default_factory=list)
    skip_prefix_cache: bool = False
    tenant: str = ""
    latency: LatencyGoal = ANY_TIME
    num_prompt: int = field(init=False)
    max_length: int = field(init=False)
    status: Status = field(init=False, default=Status.WAITING)
    table: PageTable | None = field(init=False, default=None)
    history: History = field(init=False, default_factory=History)
    drafts: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self, max_tokens: int) -> None:
        """Raise ValueError if there is nothing to compute."""
        if not self.tokens:
            raise ValueError(f"{self.sequence_id} has no tokens; a prompt needs at least one")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        self.num_prompt = len(self.tokens)
        self.max_length = self.num_prompt + max_tokens

    @property
    def digests(self) -> list[Digest]:
        """Digests of the leading full pages, as far as they are known."""
        return self.history.digests

    @property
    def num_written(self) -> int:
        return self.table.num_written if self.table is not None else 0

    @property
    def backlog(self) -> int:
        return len(self.tokens) - self.num_written


class ScheduledChunk(NamedTuple):
    """Compute ``tokens[start:stop]`` of one sequence.

    ``samples`` if that reaches its end, once for the sequence itself and once for each of the parallel
    samples that wait for it.

    ``drafts`` are rows behind ``stop``, one for each guess at the tokens that follow: as many further
    samples, of which those count that were drawn after guesses that hold.

    A named tuple, as SampleResult is: thousands are built per second, in half a dataclass's time.
    """

    sequence: Sequence
    start: int
    stop: int
    samples: bool
    parallel_samples: tuple[Sequence, ...] = ()  # those that waited when the step was planned
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Behind the last row's position."""
        return self.stop + len(self.drafts)


class StepShape(NamedTuple):
    """What a step's time depends on.

    num_decodes        rows of sequences that compute one token, and of their drafts
    num_chunk_tokens   prompt tokens
    num_positions      positions that the decoding rows attend to, in all
    chunk_positions    the same of prompt tokens
    """

    num_decodes: int
    num_chunk_tokens: int
    num_positions: int
    chunk_positions: int


class Lookup(NamedTuple):
    """What the prefix cache had for one arrival.

    num_tokens   tokens of the prompt
    num_hit      of those, found
    misses       the others by reason, see MissClassifier.count; the sum is the difference
    miss         the first page that was not found, and why
    """

    sequence: Sequence
    num_tokens: int
    num_hit: int
    misses: Mapping[str, int]
    miss: Miss


class SchedulerOutput(NamedTuple):
    """One forward over a mixed batch, decided but not yet computed.

    work       in batch order: decodes first, then prompt chunks, then arrivals, then chunks that
               left the step to arrivals
    copies     pages to copy (copy-on-write) before anything of this step is written
    preempted  sequences whose pages were taken back for others, or whose slots for another tenant
    lookups    one per sequence that was admitted for the first time
    predicted_s   seconds that the step is expected to take; None without a latency target
    shape      what its time depends on; None where nobody has asked yet
    sources    of a step that was planned before the one before it was committed: which of the samples there
               each sequence's last token is; None: all tokens are known
    plain      every sequence of it computes its last token, which was generated, and gets one more: no
               tokens of prompts, no drafts, no parallel samples, and so no lookups

    A named tuple: a frozen dataclass of as many fields takes three times as long to build.
    """

    work: tuple[ScheduledChunk, ...]
    copies: tuple[PageCopy, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    predicted_s: float | None = None
    shape: StepShape | None = None
    sources: tuple[int, ...] | None = None
    plain: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(item.end - item.start for item in self.work)

    def draws(self) -> list[tuple[Sequence, tuple[int, ...]]]:
        """``sampled``, each with the drafts beside which it gets further tokens."""
        if self.plain:
            return [(item[0], ()) for item in self.work]
        return [
            (sequence, item.drafts)
            for item in self.work
            if item.samples
            for sequence in (item.sequence, *item.parallel_samples)
        ]

    def sampled(self) -> list[Sequence]:
        """The sequences that get a token from this step, in the order of the results.

        Fixed when the step is planned: one that is aborted afterwards keeps its place.
        """
        return [sequence for sequence, _ in self.draws()]


class SampleResult(NamedTuple):
    """The token a sequence got, and whether the engine says it ends there.

    ``token`` is None when the sequence failed in this step: it ends, and nothing of the step is published to
    the prefix cache. ``more`` are the tokens after it that were drawn beside drafts that held: as many drafts
    as there are tokens. ``void``: as if the sequence had not been in the step; it is computed again."""

    token: int | None
    finished: bool = False
    more: tuple[int, ...] = ()
    void: bool = False
