"""Where published pages are kept besides the pool, and how they come back."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from typing import Protocol

from .types import SchedulerOutput, Sequence


class KVConnector(Protocol):
    """A store of pages outside the pool: a disk, other memory, another host.

    Every method is called on the scheduler's thread, between two forwards, and returns at once:
    whatever takes time happens on threads of the connector's own. A store that fails or hangs
    gives sequences back from ``poll`` without their pages; then they are computed.
    """

    @property
    def has_news(self) -> bool:
        """Whether ``poll`` would do something."""
        ...

    def on_news(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, from any thread, whenever ``has_news`` becomes true."""
        ...

    @property
    def saves_steps(self) -> bool:
        """Whether ``save`` reads pages: then no step may be submitted before the one before it is saved."""
        ...

    def keep(self, sequence: Sequence, token_s: float | None) -> None:
        """A running sequence is about to give its pages back.

        Copy out what it has published and is not kept yet, if bringing it in again is expected to be quicker
        than computing it, at ``token_s`` seconds for each token (None: nobody knows)."""
        ...

    def start_load(self, sequence: Sequence, /, *, token_s: float | None = None) -> bool:
        """Begin to bring in pages of this sequence that the pool lacks; it waits until ``poll`` returns it.

        False if there is nothing to wait for, or computing is expected to be quicker, at ``token_s`` seconds
        for each token (None: it does not matter)."""
        ...

    def poll(self) -> abc.Sequence[Sequence]:
        """Put what has come into the pool, a bounded amount, where it is cached and held by nobody.

        Returns the sequences that need wait no longer, in the order they came.
        """
        ...

    def cancel_load(self, sequence: Sequence) -> None:
        """Forget a sequence that waits; ``poll`` will not return it."""
        ...

    def save(self, step: SchedulerOutput) -> None:
        """Keep the pages that a committed step has published."""
        ...

    def close(self) -> None:
        """Keep what is still queued, within a bounded time, and end. Nothing is called afterwards."""
        ...


class NoConnector:
    """Pages are in the pool or nowhere."""

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
