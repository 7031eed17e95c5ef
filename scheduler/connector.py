"""Interface of stores that keep published pages outside the pool and load them again."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from typing import Protocol

from .types import SchedulerOutput, Sequence


class KVConnector(Protocol):
    """A store of pages outside the pool: a disk, other memory, another host.

    Every method is called on the scheduler's thread, between two steps, and returns at once. Slow work runs
    on the connector's own threads. If the store fails or hangs, ``poll`` returns the waiting sequences
    although their pages are missing; these pages are then computed.
    """

    @property
    def has_news(self) -> bool:
        """Whether ``poll`` would return or change anything."""
        ...

    def on_news(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` from any thread when ``has_news`` becomes true."""
        ...

    @property
    def saves_steps(self) -> bool:
        """Whether ``save`` reads pages, so that it must run before the next step is submitted."""
        ...

    def keep(self, sequence: Sequence, token_s: float | None) -> None:
        """Copy the published pages of a running sequence that is about to be preempted.

        Pages are copied if they are not stored yet and if loading them is expected to be faster than
        computing them at ``token_s`` seconds per token (None: unknown).
        """
        ...

    def start_load(self, sequence: Sequence, /, *, token_s: float | None = None) -> bool:
        """Start loading stored pages of a sequence that the pool lacks; ``poll`` returns the sequence later.

        Return False, and load nothing, if no such pages are stored, or if computing them is expected to be
        faster at ``token_s`` seconds per token (None: always load).
        """
        ...

    def poll(self) -> abc.Sequence[Sequence]:
        """Put a bounded number of loaded pages into the pool's cache; no table holds them.

        Return the sequences whose loading has ended, in the order of their arrival.
        """
        ...

    def cancel_load(self, sequence: Sequence) -> None:
        """Stop loading for a waiting sequence, so that ``poll`` does not return it."""
        ...

    def save(self, step: SchedulerOutput) -> None:
        """Store the pages that a committed step has published."""
        ...

    def close(self) -> None:
        """Store the queued pages within a bounded time, and shut down. No method is called afterwards."""
        ...


class NoConnector:
    """Connector of an engine that keeps pages only in the pool."""

    has_news = False
    saves_steps = False

    def on_news(self, wake: Callable[[], None]) -> None: ...

    def keep(self, sequence: Sequence, token_s: float | None) -> None: ...

    def start_load(self, _sequence: Sequence, /, *, token_s: float | None = None) -> bool:  # noqa: ARG002
        return False

    def poll(self) -> abc.Sequence[Sequence]:
        return ()

    def cancel_load(self, sequence: Sequence) -> None:
        raise AssertionError(f"{sequence.sequence_id} waits for no pages")

    def save(self, step: SchedulerOutput) -> None: ...

    def close(self) -> None: ...
