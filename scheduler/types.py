"""What the scheduler speaks about: sequences, the work of one step, and its results."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from octavo.block_manager import PageCopy, PageTable


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One token stream being served. ``tokens`` may run ahead of the K/V in memory; the
    scheduler's whole job is to let ``num_written`` catch up with ``len(tokens)``.

    siblings   sequences with the same prompt (n > 1) that wait for this one's prompt: at its
               first sample they are forked from it and get a token each
    """

    sequence_id: str
    tokens: list[int]
    max_tokens: int
    salt: bytes = b""
    siblings: list[Sequence] = field(default_factory=list)
    num_prompt: int = field(init=False)
    status: Status = field(init=False, default=Status.WAITING)
    table: PageTable | None = field(init=False, default=None)
    num_cached: int | None = field(init=False, default=None)  # prompt tokens found at first admission

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def num_written(self) -> int:
        return self.table.num_written if self.table is not None else 0

    @property
    def backlog(self) -> int:
        return len(self.tokens) - self.num_written


@dataclass(frozen=True, slots=True)
class Work:
    """Compute ``tokens[start:stop]`` of one sequence; ``samples`` if that reaches its end,
    once for the sequence itself and once for each of its waiting siblings."""

    sequence: Sequence
    start: int
    stop: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One forward over a mixed batch, decided but not yet computed.

    work       in batch order: decodes first, then prompt chunks, then arrivals
    copies     pages to copy (copy-on-write) before anything of this step is written
    preempted  sequences whose pages were taken back to make room
    """

    work: tuple[Work, ...]
    copies: tuple[PageCopy, ...] = ()
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.stop - item.start for item in self.work)

    def sampled(self) -> list[Sequence]:
        """The sequences that get a token from this step, in the order of the results."""
        return [
            sequence
            for item in self.work
            if item.samples
            for sequence in (item.sequence, *item.sequence.siblings)
        ]


@dataclass(frozen=True, slots=True)
class Result:
    """The token a sequence got, and whether the engine says it ends there.
    ``token`` is None when the sequence failed in this step: it ends, and nothing of
    the step is published to the prefix cache."""

    token: int | None
    finished: bool = False
