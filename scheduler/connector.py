from __future__ import annotations

from collections import abc
from collections.abc import Callable

from .types import SchedulerOutput, Sequence


class KVConnector:
    """A store of pages outside the pool: a disk, other memory, another host. This one stores nothing.

    Every method runs on the scheduler's thread between two steps and must return at once. If the store fails
    or hangs, ``poll`` returns the waiting sequences, and their missing pages are computed.
    """

    @property
    def has_updates(self) -> bool:
        """Whether ``poll`` would return or change anything."""
        return False

    def on_update(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` from any thread when ``has_updates`` becomes true."""

    @property
    def saves_steps(self) -> bool:
        """Whether ``save`` must run before the next step is submitted, because it reads pages."""
        return False

    def offload(self, sequence: Sequence, token_s: float | None) -> None:
        """Copy the published pages of a running sequence that is about to be preempted.

        Pages are copied only if loading is expected to be faster than computing.

        token_s   seconds to compute a token (None: unknown)
        """

    def start_load(self, sequence: Sequence, /, *, token_s: float | None = None) -> bool:  # noqa: ARG002
        """Start loading stored pages that the pool lacks; return False if nothing is loaded.

        Pages are loaded only if that is expected to be faster than computing them.

        token_s   seconds to compute a token (None: always load)
        """
        return False

    def poll(self) -> abc.Sequence[Sequence]:
        """Put some loaded pages into the cache; return sequences whose loading has ended.

        The sequences are in the order of their arrival.
        """
        return ()

    def cancel_load(self, sequence: Sequence) -> None:
        """Stop loading for a waiting sequence, so that ``poll`` does not return it."""
        raise AssertionError(f"{sequence.sequence_id} waits for no pages")

    def save(self, step: SchedulerOutput) -> None:
        """Store the pages that a committed step has published."""

    def close(self) -> None:
        """Store the queued pages within a bounded time, and shut down."""
