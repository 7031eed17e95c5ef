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

    target_itl      target in seconds for the time between two tokens (None: only the server's target)
    first_token_by  deadline of the first token, by the clock of ``Scheduler.plan`` (None: no deadline)
    """

    target_itl: float | None = None
    first_token_by: float | None = None


ANY_TIME = LatencyGoal()


@dataclass(slots=True, eq=False)
class History:
    """The past of a sequence, which the scheduler keeps whether or not the sequence runs.

    A parallel sample that replaces a sequence takes over its history.

    num_cached   number of prompt tokens found in the prefix cache when the sequence was first admitted (for
                 a parallel sample: its parent); None before
    num_preempted  how often the sequence was preempted for pages
    num_admitted_before  number of sequences admitted before its first admission
    num_overtaken  number of sequences admitted before it while it was next, see ``AgeOrder``
    num_charged  number of tokens already charged to the tenant, see ``FairQueue``
    may_load     whether it was preempted and a connector may still load its pages
    digests      known digests of its first full pages
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

    There may be more ``tokens`` than K and V in memory; steps compute the rest, up to ``len(tokens)``.

    max_tokens   maximum number of tokens to generate
    max_length   maximum number of tokens, prompt included
    priority     smaller numbers are admitted first and preempted last
    salt         pages are shared only between sequences with equal salt
    parallel_samples  other sequences with the same prompt (n > 1). When this sequence gets its first token,
                 each of them gets one, too, and a fork of its pages
    skip_prefix_cache  whether to compute the whole prompt, even if pages of it are cached
    tenant       tenant of the request, if several share a server
    media        images among the prompt's tokens, by position
    drafts       draft tokens to follow ``tokens``. A step verifies as many as its budget allows. They are
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
        """Known digests of the first full pages."""
        return self.history.digests

    @property
    def num_written(self) -> int:
        return self.table.num_written if self.table is not None else 0

    @property
    def backlog(self) -> int:
        return len(self.tokens) - self.num_written


class ScheduledChunk(NamedTuple):
    """Computation of ``tokens[start:stop]`` of one sequence.

    samples   whether the chunk reaches the sequence's end, so that the sequence and each of its waiting
              parallel samples get a token
    drafts    draft tokens; each adds a row after ``stop`` and one more sample. The sample counts if all
              drafts up to this row are accepted

    This is a named tuple, like SampleResult, because thousands are built per second, and building a dataclass
    takes twice as long.
    """

    sequence: Sequence
    start: int
    stop: int
    samples: bool
    parallel_samples: tuple[Sequence, ...] = ()  # waiting when the step was planned
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
    """Prefix-cache result of a sequence at its first admission.

    num_tokens   number of prompt tokens
    num_hit      number of prompt tokens that were found
    misses       by reason: number of prompt tokens that were not found, see MissClassifier.count
    miss         first page that was not found, and the reason
    """

    sequence: Sequence
    num_tokens: int
    num_hit: int
    misses: Mapping[str, int]
    miss: Miss


class SchedulerOutput(NamedTuple):
    """A forward over a mixed batch, planned but not yet computed.

    work       chunks in batch order: decodes, then chunks of running prompts, then arrivals, then chunks of
               running prompts that had to leave the first tokens to arrivals
    copies     pages to copy (copy-on-write) before this step writes anything
    preempted  sequences preempted for pages, or because another tenant got their slot
    lookups    prefix-cache results, one per sequence admitted for the first time
    predicted_s   predicted seconds of the step; None without a latency target
    shape      numbers on which the step's time depends; None until needed
    sources    for a step planned ahead: for each sequence, the index of the sample in the previous step
               that will be its last token. None: all tokens are known
    plain      whether the step only decodes one token per sequence: no prompt tokens, drafts, parallel
               samples or lookups

    This is a named tuple, because a frozen dataclass of as many fields takes three times as long to build.
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
        """Return the sequences of ``sampled``, each with the draft tokens that this step verifies for it."""
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

        The order is fixed when the step is planned; a sequence that is aborted later stays in the list.
        """
        return [sequence for sequence, _ in self.draws()]


class SampleResult(NamedTuple):
    """The tokens that a sequence got from a step.

    token      the first sampled token. None if the sequence failed: it ends, and pages of this step are not
               published
    finished   whether the sequence ends after these tokens
    more       further tokens, one per accepted draft
    void       whether to ignore the result; the sequence then computes the same rows again
    """

    token: int | None
    finished: bool = False
    more: tuple[int, ...] = ()
    void: bool = False
