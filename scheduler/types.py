from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

from octavo.block_manager import Digest, MediaSpan, Miss, PageCopy, PageTable


class Status(enum.Enum):
    WAITING_FOR_PAGES = enum.auto()  # a connector loads pages of its prompt
    WAITING_FOR_MEDIA = enum.auto()  # the next chunk needs an image that is not encoded
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class LatencyGoal(NamedTuple):
    """Latency targets of a request.

    target_itl      target in seconds for the time between two tokens (None: only the server's target)
    first_token_by  deadline of the first token, in seconds of the scheduler's clock (None: no deadline)
    """

    target_itl: float | None = None
    first_token_by: float | None = None


ANY_TIME = LatencyGoal()


@dataclass(slots=True, eq=False)
class History:
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

    Steps compute K and V until they cover all ``tokens``.

    max_length   maximum number of tokens, prompt included
    priority     smaller numbers are admitted first and preempted last
    salt         pages are shared only by sequences with equal salts
    parallel_samples  other sequences with this prompt (n > 1); each gets a fork after the first token
    skip_prefix_cache  whether to compute the whole prompt, even if pages of it are cached
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

    def __post_init__(self, max_tokens: int) -> None:
        if not self.tokens:
            raise ValueError(f"{self.sequence_id} has no tokens; a prompt needs at least one")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        self.num_prompt = len(self.tokens)
        self.max_length = self.num_prompt + max_tokens

    @property
    def digests(self) -> list[Digest]:
        return self.history.digests

    @property
    def num_written(self) -> int:
        return self.table.num_written if self.table is not None else 0

    @property
    def backlog(self) -> int:
        return len(self.tokens) - self.num_written


class ScheduledChunk(NamedTuple):
    """Computation of ``tokens[start:stop]`` of one sequence.

    samples   whether the chunk reaches the sequence's end, so that a token is sampled
    drafts    draft tokens; each adds a row and a sample after ``stop``

    A named tuple, because building a dataclass takes twice as long.
    """

    sequence: Sequence
    start: int
    stop: int
    samples: bool
    parallel_samples: tuple[Sequence, ...] = ()
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.stop + len(self.drafts)


class StepShape(NamedTuple):
    """Numbers on which a step's time depends.

    num_decodes        rows of decoding sequences and of drafts
    num_chunk_tokens   prompt tokens
    num_positions      total number of positions that decoding rows attend to
    chunk_positions    total number of positions that prompt tokens attend to
    """

    num_decodes: int
    num_chunk_tokens: int
    num_positions: int
    chunk_positions: int


class Lookup(NamedTuple):
    """Prefix-cache result of a sequence at its first admission."""

    sequence: Sequence
    num_tokens: int
    num_hit: int
    misses: Mapping[str, int]
    miss: Miss


class SchedulerOutput(NamedTuple):
    """A planned step: one forward pass over a mixed batch.

    work       chunks in batch order: decodes, running prompts, new sequences, delayed prompts
    predicted_s   predicted seconds of the step; None without a latency target
    sources    for a step planned ahead: per sequence, the index of its last token in the previous
               step's samples. None: all tokens are known

    A named tuple, because building a frozen dataclass takes three times as long.
    """

    work: tuple[ScheduledChunk, ...]
    copies: tuple[PageCopy, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    predicted_s: float | None = None
    shape: StepShape | None = None
    sources: tuple[int, ...] | None = None
    decode_only: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(item.end - item.start for item in self.work)

    def sampled_with_drafts(self) -> list[tuple[Sequence, tuple[int, ...]]]:
        """Return the sequences of ``sampled``, each with the draft tokens that this step verifies."""
        if self.decode_only:
            return [(item[0], ()) for item in self.work]
        return [
            (sequence, item.drafts)
            for item in self.work
            if item.samples
            for sequence in (item.sequence, *item.parallel_samples)
        ]

    def sampled(self) -> list[Sequence]:
        """Return the sequences that get a token from this step, in the order of the results."""
        return [sequence for sequence, _ in self.sampled_with_drafts()]


class SampleResult(NamedTuple):
    """The tokens that a sequence got from a step.

    token       the first sampled token; None if the sequence failed and ends
    finished    whether the sequence ends after these tokens
    accepted    further tokens, one per accepted draft
    discarded   whether to ignore the result; the sequence then computes these rows again
    """

    token: int | None
    finished: bool = False
    accepted: tuple[int, ...] = ()
    discarded: bool = False
