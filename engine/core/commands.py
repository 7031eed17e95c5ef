"""Everything that is asked of the engine's thread besides serving requests: typed commands.

A command is a frozen record of plain data, and so is its answer: both can be pickled, so the engine
could run in a process of its own without a change to whoever asks. The engine's thread executes them,
one at a time, between two steps. Each holds up the next step, so each is short: what takes longer is
asked for in portions, or worked out by whoever asks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from octavo.block_manager import Digest, EventsLost, PageContents, PageEvent
from octavo.block_manager.pins import PinLimit
from octavo.kernels.page_bytes import PageBytes

from ..api.engine_info import AdapterInfo
from ..api.errors import EventsGone, NotConfigured
from ..inspection.lookup_history import LookupRecord
from ..inspection.prefix_cache_inspector import CacheTotals, Pinned, PrefixCacheInspector
from ..inspection.reuse_tree import ReusedPrefix
from ..kv_store.page_runs import PageLayoutKey, PagePart
from ..kv_store.transfer import CachedPrefix, Inserted, PageTransfer
from .adapter_part import AdapterPart

AnswerT = TypeVar("AnswerT")
AnswerT_co = TypeVar("AnswerT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class CommandTarget:
    """The prefix cache, pages and adapters of one core, for its commands. Only its thread has one."""

    cache: PrefixCacheInspector
    transfer: PageTransfer
    adapters: AdapterPart | None = None


@dataclass(frozen=True, slots=True)
class Command(ABC, Generic[AnswerT_co]):
    """Something the engine's thread does between two steps; ``AnswerT_co`` is what it answers.

    changes_pages   whether gauges must be measured anew before the answer is given
    """

    changes_pages: ClassVar[bool] = False

    @abstractmethod
    def execute(self, core: CommandTarget) -> AnswerT_co:
        """Do it, on the engine's thread."""


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
    """The cache's totals, and the pins of one owner (None: all)."""

    pin_owner: str | None = None

    def execute(self, core: CommandTarget) -> CacheStats:
        return CacheStats(core.cache.totals(), core.cache.pins(self.pin_owner))


@dataclass(frozen=True, slots=True)
class ListReusedPrefixes(Command[list[ReusedPrefix]]):
    """The prefixes that were found again, of salts that begin with ``salt_prefix``."""

    salt_prefix: bytes = b""

    def execute(self, core: CommandTarget) -> list[ReusedPrefix]:
        return core.cache.prefixes(self.salt_prefix)


@dataclass(frozen=True, slots=True)
class ExplainRequest(Command[LookupRecord]):
    """What a request found in the cache. NotFound when it is not among the latest."""

    request_id: str

    def execute(self, core: CommandTarget) -> LookupRecord:
        return core.cache.remembered(self.request_id).lookup


@dataclass(frozen=True, slots=True)
class GetRequestTokens(Command[RequestTokens]):
    """A request's tokens so far. NotFound when it is not among the latest."""

    request_id: str

    def execute(self, core: CommandTarget) -> RequestTokens:
        remembered = core.cache.remembered(self.request_id)
        return RequestTokens(remembered.tokens, remembered.salt)


@dataclass(frozen=True, slots=True)
class PinPrefix(Command[Pinned]):
    """Keep what is cached of these tokens. NotConfigured, Overloaded or NotFound, and then no change.

    owner      whose pin it is
    max_pages  that these may keep together (None: as many as may be pinned at all)
    """

    changes_pages: ClassVar[bool] = True

    name: str
    tokens: tuple[int, ...]
    salt: bytes = b""
    owner: str = ""
    max_pages: int | None = None

    def execute(self, core: CommandTarget) -> Pinned:
        limit = None if self.max_pages is None else PinLimit(self.owner, self.max_pages)
        return core.cache.pin(self.name, self.tokens, salt=self.salt, limit=limit)


@dataclass(frozen=True, slots=True)
class UnpinPrefix(Command[int]):
    """Let a pin go; the pages of all pins afterwards. NotFound, naming it as ``shown``, if there is none."""

    changes_pages: ClassVar[bool] = True

    name: str
    shown: str

    def execute(self, core: CommandTarget) -> int:
        return core.cache.unpin(self.name, shown=self.shown)


@dataclass(frozen=True, slots=True)
class FlushCache(Command[int]):
    """Forget every cached page that nobody holds; how many there were."""

    changes_pages: ClassVar[bool] = True

    def execute(self, core: CommandTarget) -> int:
        return core.cache.flush()


# --- Page events


@dataclass(frozen=True, slots=True)
class SubscribeEvents(Command[EventLogState]):
    """Announce page events from now on, until ``UnsubscribeEvents``, however often this was asked.

    tokens   keep the tokens of pages that are published from now on
    """

    tokens: bool = False

    def execute(self, core: CommandTarget) -> EventLogState:
        cache = core.cache
        number = cache.watch(tokens=self.tokens)
        since = cache.blocks.events.tokens_since or number
        return EventLogState(number, cache.log_id, cache.log_began, since)


@dataclass(frozen=True, slots=True)
class UnsubscribeEvents(Command[None]):
    """Announce no page events any more."""

    def execute(self, core: CommandTarget) -> None:
        core.cache.is_watched = False


@dataclass(frozen=True, slots=True)
class PageEventsSince(Command[list[PageEvent]]):
    """The first ``limit`` events from ``number`` on. EventsGone when they are not kept, or yet to come."""

    number: int
    limit: int

    def execute(self, core: CommandTarget) -> list[PageEvent]:
        try:
            return core.cache.events(self.number, self.limit)
        except EventsLost as error:
            raise EventsGone(str(error)) from error


@dataclass(frozen=True, slots=True)
class GetCachedContents(Command[CachedContents]):
    """What is in the pages that can be found, as far as tokens are kept."""

    def execute(self, core: CommandTarget) -> CachedContents:
        blocks = core.cache.blocks
        unknown = (blocks.events.tokens_since or 1) - 1
        return CachedContents(blocks.events.next_number - 1, unknown, blocks.cached_contents())


# --- Pages out of the pools and into them


@dataclass(frozen=True, slots=True)
class GetPageLayout(Command[PageLayoutKey]):
    """Which engines' pages this one can take. NotConfigured without a prefix cache."""

    def execute(self, core: CommandTarget) -> PageLayoutKey:
        return core.transfer.kind


@dataclass(frozen=True, slots=True)
class FindPrefix(Command[CachedPrefix]):
    """How much of a sequence with these pages is cached. Nothing is held for whoever asks."""

    digests: tuple[Digest, ...]

    def execute(self, core: CommandTarget) -> CachedPrefix:
        return core.transfer.find_prefix(self.digests)


@dataclass(frozen=True, slots=True)
class ReadPages(Command[tuple[PagePart, ...]]):
    """Copies of what can be found now, per group of layers.

    digests   of some pages
    wanted    per group: which of them, rising; None: all
    """

    digests: tuple[Digest, ...]
    wanted: tuple[tuple[int, ...], ...] | None = None

    def execute(self, core: CommandTarget) -> tuple[PagePart, ...]:
        return core.transfer.read(self.digests, self.wanted)


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

    def execute(self, core: CommandTarget) -> Inserted:
        return core.transfer.insert(self.tokens, self.pages, self.salt, first=self.first, group=self.group)


@dataclass(frozen=True, slots=True)
class ListPages(Command[dict[Digest, PageContents]]):
    """What every page that can be found holds, and those that lead to them. Empty unless the engine was
    started to remember it (``save_dir``)."""

    def execute(self, core: CommandTarget) -> dict[Digest, PageContents]:
        return core.transfer.list_pages()


# --- Adapters


def _adapters(core: CommandTarget) -> AdapterPart:
    if core.adapters is None:
        raise NotConfigured(
            "the engine was started without adapters; start it with --lora-dir or --lora-memory"
        )
    return core.adapters


@dataclass(frozen=True, slots=True)
class LoadAdapter(Command[AdapterInfo]):
    """Read an adapter from a folder. InvalidRequest for one that cannot be served. ``replace``: one of this
    name gives way to it."""

    name: str
    folder: str
    replace: bool = False

    def execute(self, core: CommandTarget) -> AdapterInfo:
        return _adapters(core).load(self.name, Path(self.folder), replace=self.replace)


@dataclass(frozen=True, slots=True)
class UnloadAdapter(Command[None]):
    """Forget an adapter. NotFound if there is none, InvalidRequest while requests use it."""

    name: str

    def execute(self, core: CommandTarget) -> None:
        _adapters(core).unload(self.name)
