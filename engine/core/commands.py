"""Everything that is asked of the engine's thread besides serving requests: typed commands.

A command is a frozen record of plain data, and so is its answer: both can be pickled, so the engine
could run in a process of its own without a change to whoever asks. ``dispatcher.py`` executes them,
one at a time, between two steps. Each holds up the next step, so each is short: what takes longer is
asked for in portions, or worked out by whoever asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from octavo.block_manager import Digest, PageContents, PageEvent
from octavo.kernels.page_bytes import PageBytes

from ..inspection.lookup_history import LookupRecord
from ..inspection.prefix_cache_inspector import CacheTotals, Pinned
from ..inspection.reuse_tree import ReusedPrefix
from ..kv_store.page_runs import PageLayoutKey, PagePart
from ..kv_store.transfer import CachedPrefix, Inserted

AnswerT = TypeVar("AnswerT")
AnswerT_co = TypeVar("AnswerT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Command(Generic[AnswerT_co]):
    """Something the engine's thread does between two steps; ``AnswerT_co`` is what it answers.

    changes_pages   whether gauges must be measured anew before the answer is given
    """

    changes_pages: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The totals of the prefix cache, and positions kept by those pins that were asked for, by name."""

    totals: CacheTotals
    pins: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RequestTokens:
    """A request's prompt with what its first sample has said so far, and its cache salt."""

    tokens: tuple[int, ...]
    salt: bytes


@dataclass(frozen=True, slots=True)
class EventLogState:
    """Where the log of page events stands.

    number         of the next event, of the log ``log_id``, which began at ``log_began`` (seconds
                   since the epoch)
    tokens_since   number of the first event with tokens; ``number`` if they are not kept
    """

    number: int
    log_id: str
    log_began: float
    tokens_since: int


@dataclass(frozen=True, slots=True)
class CachedContents:
    """The pages that can be found and whose tokens are known.

    number    of the last event that they are in accord with
    unknown   events before tokens were kept: pages stored then are left out
    """

    number: int
    unknown: int
    pages: Mapping[Digest, PageContents]


# --- The prefix cache as operators see it


@dataclass(frozen=True, slots=True)
class GetCacheStats(Command[CacheStats]):
    """The cache's totals, and the pins whose names begin with ``pin_prefix``."""

    pin_prefix: str = ""


@dataclass(frozen=True, slots=True)
class ListReusedPrefixes(Command[list[ReusedPrefix]]):
    """The prefixes that were found again, of salts that begin with ``salt_prefix``."""

    salt_prefix: bytes = b""


@dataclass(frozen=True, slots=True)
class ExplainRequest(Command[LookupRecord]):
    """What a request found in the cache. NotFound when it is not among the latest."""

    request_id: str


@dataclass(frozen=True, slots=True)
class GetRequestTokens(Command[RequestTokens]):
    """A request's tokens so far. NotFound when it is not among the latest."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PinPrefix(Command[Pinned]):
    """Keep what is cached of these tokens. NotConfigured, Overloaded or NotFound, and then no change.

    owner      what the names of all its owner's pins begin with
    max_pages  that these may keep together (None: as many as may be pinned at all)
    """

    changes_pages: ClassVar[bool] = True

    name: str
    tokens: tuple[int, ...]
    salt: bytes = b""
    owner: str = ""
    max_pages: int | None = None


@dataclass(frozen=True, slots=True)
class UnpinPrefix(Command[int]):
    """Let a pin go; the pages of all pins afterwards. NotFound, naming it as ``shown``, if there is none."""

    changes_pages: ClassVar[bool] = True

    name: str
    shown: str


@dataclass(frozen=True, slots=True)
class FlushCache(Command[int]):
    """Forget every cached page that nobody holds; how many there were."""

    changes_pages: ClassVar[bool] = True


# --- Page events


@dataclass(frozen=True, slots=True)
class SubscribeEvents(Command[EventLogState]):
    """Announce page events from now on, until ``UnsubscribeEvents``, however often this was asked.

    tokens   keep the tokens of pages that are published from now on
    """

    tokens: bool = False


@dataclass(frozen=True, slots=True)
class UnsubscribeEvents(Command[None]):
    """Announce no page events any more."""


@dataclass(frozen=True, slots=True)
class PageEventsSince(Command[list[PageEvent]]):
    """The first ``limit`` events from ``number`` on. EventsGone when they are not kept, or yet to come."""

    number: int
    limit: int


@dataclass(frozen=True, slots=True)
class GetCachedContents(Command[CachedContents]):
    """What is in the pages that can be found, as far as tokens are kept."""


# --- Pages out of the pools and into them


@dataclass(frozen=True, slots=True)
class GetPageLayout(Command[PageLayoutKey]):
    """Which engines' pages this one can take. NotConfigured without a prefix cache."""


@dataclass(frozen=True, slots=True)
class FindPrefix(Command[CachedPrefix]):
    """How much of a sequence with these pages is cached. Nothing is held for whoever asks."""

    digests: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class CountCached(Command[int]):
    """Tokens of a prompt that are in the prefix cache now, of those that it would start from."""

    tokens: tuple[int, ...]
    salt: bytes
    quantize_after: int | None


@dataclass(frozen=True, slots=True)
class ReadPages(Command[tuple[PagePart, ...]]):
    """Copies of what can be found now, per group of layers.

    digests   of some pages
    wanted    per group: which of them, rising; None: all
    """

    digests: tuple[Digest, ...]
    wanted: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class InsertPages(Command[Inserted]):
    """Cache pages ``first``, ``first + 1``, ... of a sequence in one group of layers.

    tokens   of the sequence up to the end of the last of these pages
    """

    changes_pages: ClassVar[bool] = True

    tokens: tuple[int, ...]
    pages: PageBytes
    salt: bytes
    first: int
    group: int


@dataclass(frozen=True, slots=True)
class ListPages(Command[dict[Digest, PageContents]]):
    """What every page that can be found holds, and those that lead to them. Empty unless the engine was
    started to remember it (``save_dir``)."""
