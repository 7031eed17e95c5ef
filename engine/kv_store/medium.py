from __future__ import annotations

from collections.abc import Sequence

from octavo.block_manager import Digest
from octavo.scheduler import Sequence as Served

from .prefetch import FetchedPage, PrefetchJob


class Medium:
    """Where a ``PageStore`` keeps pages: host memory, or shards on disk or in a remote cache."""

    def offload(self, sequence: Served, token_s: float | None) -> None:
        """Copy the published pages of a sequence; see ``KVConnector.offload``."""
        raise NotImplementedError

    def used(self, digests: Sequence[Digest]) -> None:
        """Called with the pages of each new prompt."""

    def start(self, job: PrefetchJob) -> bool:
        """Start reading the pages that a job needs; return False if none would be read."""
        raise NotImplementedError

    def take(self, job: PrefetchJob, num_bytes: int) -> list[FetchedPage]:
        """Return the next pages, up to about ``num_bytes``."""
        return job.take(num_bytes)

    def loaded(self, num_new: int, num_bytes: int, seconds: float) -> None:
        """Called after pages were put into the pool."""

    def cancel(self, job: PrefetchJob) -> None: ...
