"""Types of the scheduler: sequences, the work of a step, and its results."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

from octavo.block_manager import Digest, MediaSpan, Miss, PageCopy, PageTable


class Status(enum.Enum):
    """State of a sequence."""

    WAITING_FOR_PAGES = enum.auto()  # a connector loads pages of its prompt
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class LatencyGoal(NamedTuple):
    """Latency targets of a request.

    target_itl      target seconds between two tokens (None: no target of its own)
    first_token_by  deadline of the first token, by the clock of ``Scheduler.plan`` (None: no deadline)
    """

    target_itl: float | None = None
    first_token_by: float | None = None


ANY_TIME = LatencyGoal()


@dataclass(slots=True, eq=False)
class History:
    """Facts about a sequence that the scheduler keeps whether or not it runs.

    A parallel sample that replaces a sequence takes over its history.

    num_cached   prompt tokens found in the prefix cache at first admission (for a parallel sample at its
                 parent's); None before
    num_preempted  number of its preemptions for pages
    num_admitted_before  number of sequences admitted before its first admission
    num_overtaken  number of sequences admitted before it while it was next, see ``AgeOrder``
    num_charged  tokens already charged to the tenant, if service is accounted
    may_load     it was preempted, and a connector may still load its pages
    digests      known digests of its leading full pages
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
    """A token stream being served.

    ``tokens`` may be ahead of the K and V in memory: the scheduler lets ``num_written`` catch up with it.

    max_tokens   maximum number of tokens to generate
    max_length   maximum number of tokens, prompt included
    priority     smaller numbers are admitted first and preempted last
    salt         pages are shared only between sequences with equal salt
    parallel_samples  sequences with the same prompt (n > 1); at this one's first token, they are
                 forked from it and get a token each
    skip_prefix_cache  never start from cached pages, because the request needs the whole prompt computed
    tenant       tenant of the request, if several share a server
    media        images among the prompt's tokens, by position
    drafts       draft tokens after ``tokens``, computed with the last of these if the step has room; they are
                 replaced whenever a token is appended
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
    media: tuple[MediaSpan, ...] = ()
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
        """Known digests of the leading full pages."""
        return self.history.digests

    @property
    def num_written(self) -> int:
        return self.table.num_written if self.table is not None else 0

    @property
    def backlog(self) -> int:
        return len(self.tokens) - self.num_written


class ScheduledChunk(NamedTuple):
    """Computation of ``tokens[start:stop]`` of one sequence.

    ``samples``: the chunk reaches the end, so the sequence and each of its waiting parallel samples get a
    token.

    ``drafts``: draft tokens, each one more row after ``stop`` with a further sample. A sample counts if all
    drafts before it are accepted.

    A named tuple, as SampleResult is, because thousands are built per second and a dataclass takes twice as
    long.
    """

    sequence: Sequence
    start: int
    stop: int
    samples: bool
    parallel_samples: tuple[Sequence, ...] = ()  # those waiting when the step was planned
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The position after the last row, drafts included."""
        return self.stop + len(self.drafts)


class StepShape(NamedTuple):
    """Numbers on which a step's time depends.

    num_decodes        rows of sequences that compute one token, and rows of drafts
    num_chunk_tokens   prompt tokens
    num_positions      total number of positions that decoding rows attend to
    chunk_positions    total number of positions that prompt tokens attend to
    """

    num_decodes: int
    num_chunk_tokens: int
    num_positions: int
    chunk_positions: int


class Lookup(NamedTuple):
    """Prefix-cache result of one arrival.

    num_tokens   tokens of the prompt
    num_hit      prompt tokens that were found
    misses       prompt tokens that were not found, by reason, see MissClassifier.count
    miss         first page that was not found, and the reason
    """

    sequence: Sequence
    num_tokens: int
    num_hit: int
    misses: Mapping[str, int]
    miss: Miss


class SchedulerOutput(NamedTuple):
    """A forward over a mixed batch, planned but not yet computed.

    work       in batch order: decodes first, then prompt chunks, then arrivals, then chunks that
               left the step to arrivals
    copies     pages to copy (copy-on-write) before anything of this step is written
    preempted  sequences that lost their pages, or their slots to another tenant
    lookups    prefix-cache results, one per sequence admitted for the first time
    predicted_s   predicted seconds of the step; None without a latency target
    shape      numbers on which its time depends; None until needed
    sources    for a step planned ahead: for each sequence, the index of the sample of the previous step
               that gives its last token; None: all tokens are known
    plain      every sequence computes its last generated token and gets one more: no prompt tokens, drafts,
               parallel samples or lookups

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
        """Return ``sampled``, each with the drafts that are verified for it."""
        if self.plain:
            return [(item[0], ()) for item in self.work]
        return [
            (sequence, item.drafts)
            for item in self.work
            if item.samples
            for sequence in (item.sequence, *item.parallel_samples)
        ]

    def sampled(self) -> list[Sequence]:
        """Return the sequences that get a token from this step, in the order of the results.

        The order is fixed when the step is planned; a sequence that is aborted later keeps its place.
        """
        return [sequence for sequence, _ in self.draws()]


class SampleResult(NamedTuple):
    """The token that a sequence got, and whether the engine ends it there.

    ``token`` is None if the sequence failed in this step: it ends, and the prefix cache gets none of its
    pages of this step. ``more`` has the tokens sampled after accepted drafts, one per accepted draft.
    ``void``: the result counts as if the sequence had not been in the step, and it is computed again.
    """

    token: int | None
    finished: bool = False
    more: tuple[int, ...] = ()
    void: bool = False
