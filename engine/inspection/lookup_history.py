from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from octavo.block_manager import MediaSpan, Miss
from octavo.scheduler import Lookup, Sequence, Status

MAX_REQUESTS = 1024
MAX_TOKENS = 1_000_000  # total tokens of the recorded requests (4 MB)


@dataclass(frozen=True, slots=True)
class LookupRecord:
    """Prefix-cache look-up of one request's prompt.

    misses       tokens not found, by reason
    at           seconds of the engine's clock
    """

    num_tokens: int
    num_hit: int
    misses: Mapping[str, int]
    miss: Miss
    at: float


@dataclass(slots=True)
class HistoryEntry:
    lookup: LookupRecord
    salt: bytes
    source: Sequence | array[int]
    media: tuple[MediaSpan, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        source = self.source
        return tuple(source.tokens if isinstance(source, Sequence) else source)


class LookupHistory:
    """Look-ups of the latest requests, by request id."""

    def __init__(self, *, max_requests: int = MAX_REQUESTS, max_tokens: int = MAX_TOKENS) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._latest: OrderedDict[str, HistoryEntry] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, request_id: str, lookup: Lookup, *, now: float) -> None:
        sequence = lookup.sequence
        self._forget(request_id)
        found = LookupRecord(lookup.num_tokens, lookup.num_hit, lookup.misses, lookup.miss, now)
        self._latest[request_id] = HistoryEntry(found, sequence.salt, sequence, sequence.media)
        if len(self._latest) > self._max_requests:
            self._forget(next(iter(self._latest)))

    def ended(self, request_id: str) -> None:
        remembered = self._latest.get(request_id)
        if remembered is None or not isinstance(remembered.source, Sequence):
            return
        if remembered.source.status is not Status.FINISHED:
            return
        remembered.source = array("I", remembered.source.tokens)
        self._num_tokens += len(remembered.source)
        while self._num_tokens > self._max_tokens and len(self._latest) > 1:
            self._forget(next(iter(self._latest)))

    def get(self, request_id: str) -> HistoryEntry | None:
        return self._latest.get(request_id)

    def _forget(self, request_id: str) -> None:
        remembered = self._latest.pop(request_id, None)
        if remembered is not None and not isinstance(remembered.source, Sequence):
            self._num_tokens -= len(remembered.source)
