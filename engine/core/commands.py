"""Commands that the engine's thread executes between steps.

Commands and answers are picklable, because the engine may run in another process.
A command delays the next step, so it must be short.
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
from ..inspection.reused_prefixes import ReusedPrefix
from ..kv_store.page_runs import PageLayoutKey, PagePart
from ..kv_store.transfer import CachedPrefix, Inserted, PageTransfer
from .adapter_part import AdapterPart

AnswerT = TypeVar("AnswerT")
AnswerT_co = TypeVar("AnswerT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class CommandTarget:
    cache: PrefixCacheInspector
    transfer: PageTransfer
    adapters: AdapterPart | None = None


@dataclass(frozen=True, slots=True)
class Command(ABC, Generic[AnswerT_co]):
    """Work for the engine's thread between two steps."""

    changes_pages: ClassVar[bool] = False

    @abstractmethod
    def execute(self, core: CommandTarget) -> AnswerT_co: ...


@dataclass(frozen=True, slots=True)
class CacheStats:
    totals: CacheTotals
    pins: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RequestTokens:
    tokens: tuple[int, ...]
    salt: bytes


@dataclass(frozen=True, slots=True)
class EventLogState:
    """State of the log of page events.

    number         number of the next event
    log_began      seconds since the epoch
    tokens_since   number of the first event that has tokens
    """

    number: int
    log_id: str
    log_began: float
    tokens_since: int


@dataclass(frozen=True, slots=True)
class CachedContents:
    """Cached pages with known tokens. ``number`` is the latest event that they include."""

    number: int
    unknown: int
    pages: Mapping[Digest, PageContents]


@dataclass(frozen=True, slots=True)
class GetCacheStats(Command[CacheStats]):
    """Return the cache's totals and the pins of ``pin_owner``; None: pins of all owners."""

    pin_owner: str | None = None

    def execute(self, core: CommandTarget) -> CacheStats:
        return CacheStats(core.cache.totals(), core.cache.pins(self.pin_owner))


@dataclass(frozen=True, slots=True)
class ListReusedPrefixes(Command[list[ReusedPrefix]]):
    """Return the reused prefixes that saved most, of salts that begin with ``salt_prefix``."""

    salt_prefix: bytes
    most: int

    def execute(self, core: CommandTarget) -> list[ReusedPrefix]:
        return core.cache.reused.best(self.salt_prefix, self.most)


@dataclass(frozen=True, slots=True)
class ExplainRequest(Command[LookupRecord]):
    """Return a request's prefix-cache look-up. Raises NotFound if the history lacks the request."""

    request_id: str

    def execute(self, core: CommandTarget) -> LookupRecord:
        return core.cache.remembered(self.request_id).lookup


@dataclass(frozen=True, slots=True)
class GetRequestTokens(Command[RequestTokens]):
    """Return a request's tokens so far. Raises NotFound if the history lacks the request."""

    request_id: str

    def execute(self, core: CommandTarget) -> RequestTokens:
        remembered = core.cache.remembered(self.request_id)
        return RequestTokens(remembered.tokens, remembered.salt)


@dataclass(frozen=True, slots=True)
class PinPrefix(Command[Pinned]):
    """Pin the cached pages of these tokens. Raises NotConfigured, Overloaded or NotFound.

    ``max_pages`` limits all pins of this owner. If it is None, only the total limit applies.
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
    """Release a pin; return the number of pages that are still pinned."""

    changes_pages: ClassVar[bool] = True

    name: str
    shown: str

    def execute(self, core: CommandTarget) -> int:
        return core.cache.unpin(self.name, shown=self.shown)


@dataclass(frozen=True, slots=True)
class FlushCache(Command[int]):
    """Discard every cached page that is not in use; return the number of discarded pages."""

    changes_pages: ClassVar[bool] = True

    def execute(self, core: CommandTarget) -> int:
        return core.cache.flush()


@dataclass(frozen=True, slots=True)
class SubscribeEvents(Command[EventLogState]):
    """Start announcing page events. With ``tokens``, record the tokens of new pages."""

    tokens: bool = False

    def execute(self, core: CommandTarget) -> EventLogState:
        cache = core.cache
        number = cache.watch(tokens=self.tokens)
        since = cache.blocks.events.tokens_since or number
        return EventLogState(number, cache.log_id, cache.log_began, since)


@dataclass(frozen=True, slots=True)
class UnsubscribeEvents(Command[None]):
    def execute(self, core: CommandTarget) -> None:
        core.cache.is_watched = False


@dataclass(frozen=True, slots=True)
class PageEventsSince(Command[list[PageEvent]]):
    """Return at most ``limit`` events, starting at ``number``. Raises EventsGone if an event is gone."""

    number: int
    limit: int

    def execute(self, core: CommandTarget) -> list[PageEvent]:
        try:
            return core.cache.events(self.number, self.limit)
        except EventsLost as error:
            raise EventsGone(str(error)) from error


@dataclass(frozen=True, slots=True)
class GetCachedContents(Command[CachedContents]):
    """Return the contents of cached pages with known tokens."""

    def execute(self, core: CommandTarget) -> CachedContents:
        blocks = core.cache.blocks
        unknown = (blocks.events.tokens_since or 1) - 1
        return CachedContents(blocks.events.next_number - 1, unknown, blocks.cached_contents())


@dataclass(frozen=True, slots=True)
class GetPageLayout(Command[PageLayoutKey]):
    """Return the layout of the engine's pages. Raises NotConfigured without a prefix cache."""

    def execute(self, core: CommandTarget) -> PageLayoutKey:
        return core.transfer.kind


@dataclass(frozen=True, slots=True)
class FindPrefix(Command[CachedPrefix]):
    """Return the longest cached prefix of a sequence with these pages."""

    digests: tuple[Digest, ...]

    def execute(self, core: CommandTarget) -> CachedPrefix:
        return core.transfer.find_prefix(self.digests)


@dataclass(frozen=True, slots=True)
class ReadPages(Command[tuple[PagePart, ...]]):
    """Return copies of cached pages: one ``PagePart`` per group of layers, then one for states.

    ``wanted`` has ascending indices into ``digests`` for each part; None: all pages.
    """

    digests: tuple[Digest, ...]
    wanted: tuple[tuple[int, ...], ...] | None = None

    def execute(self, core: CommandTarget) -> tuple[PagePart, ...]:
        return core.transfer.read(self.digests, self.wanted)


@dataclass(frozen=True, slots=True)
class InsertPages(Command[Inserted]):
    """Cache pages ``first``, ``first + 1``, ... of a sequence in one group of layers."""

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
    """Return the contents of every cached page. Empty unless ``save_dir`` is set."""

    def execute(self, core: CommandTarget) -> dict[Digest, PageContents]:
        return core.transfer.list_pages()


def _adapters(core: CommandTarget) -> AdapterPart:
    if core.adapters is None:
        raise NotConfigured(
            "the engine was started without adapters; start it with --lora-dir or --lora-memory"
        )
    return core.adapters


@dataclass(frozen=True, slots=True)
class LoadAdapter(Command[AdapterInfo]):
    """Load an adapter from a folder. Raises InvalidRequest if the adapter is not supported."""

    name: str
    folder: str
    replace: bool = False

    def execute(self, core: CommandTarget) -> AdapterInfo:
        return _adapters(core).load(self.name, Path(self.folder), replace=self.replace)


@dataclass(frozen=True, slots=True)
class UnloadAdapter(Command[None]):
    """Unload an adapter. Raises NotFound for an unknown name, InvalidRequest while requests use it."""

    name: str

    def execute(self, core: CommandTarget) -> None:
        _adapters(core).unload(self.name)
