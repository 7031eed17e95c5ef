"""Commands that the engine's thread executes between steps.

Calling one gives a picklable ``Command``, because the engine may run in another process.
A command delays the next step, so it must be short.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from octavo.block_manager import Digest, EventsLost, MediaSpan, PageContents, PageEvent
from octavo.block_manager.pins import PinLimit
from octavo.kernels.page_bytes import PageBytes

from ..api.engine_info import AdapterInfo
from ..api.errors import EventsGone, NotConfigured
from ..inspection.lookup_history import LookupRecord
from ..inspection.prefix_cache_inspector import CacheTotals, Pinned, PrefixCacheInspector
from ..inspection.reused_prefixes import ReusedPrefix
from ..kv_store.page_runs import PageLayoutKey, PagePart
from ..kv_store.shard_store import ShardStore
from ..kv_store.transfer import CachedPrefix, PageTransfer
from .adapter_part import AdapterPart
from .step_parts import StepPart

AnswerT = TypeVar("AnswerT")
AnswerT_co = TypeVar("AnswerT_co", covariant=True)
Arguments = ParamSpec("Arguments")


@dataclass(frozen=True, slots=True)
class CommandTarget:
    cache: PrefixCacheInspector
    transfer: PageTransfer
    parts: Sequence[StepPart] = ()
    shards: ShardStore | None = None


class Command(NamedTuple, Generic[AnswerT_co]):
    """Work for the engine's thread between two steps."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def execute(self, core: CommandTarget) -> AnswerT_co:
        answer: AnswerT_co = COMMANDS[self.name](core, *self.args, **self.kwargs)
        return answer


COMMANDS: dict[str, Callable[..., Any]] = {}


def command(
    function: Callable[Concatenate[CommandTarget, Arguments], AnswerT],
) -> Callable[Arguments, Command[AnswerT]]:
    COMMANDS[function.__name__] = function

    @functools.wraps(function)
    def made(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Command[AnswerT]:
        return Command(function.__name__, args, kwargs)

    return made


@dataclass(frozen=True, slots=True)
class CacheStats:
    totals: CacheTotals
    pins: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RequestTokens:
    tokens: tuple[int, ...]
    salt: bytes
    media: tuple[MediaSpan, ...] = ()


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


@command
def get_cache_stats(core: CommandTarget, pin_owner: str | None = None) -> CacheStats:
    """Return the cache's totals and the pins of ``pin_owner``; None: pins of all owners."""
    return CacheStats(core.cache.totals(), core.cache.pins(pin_owner))


@command
def list_reused_prefixes(core: CommandTarget, salt_prefix: bytes, most: int) -> list[ReusedPrefix]:
    """Return the reused prefixes that saved most, of salts that begin with ``salt_prefix``."""
    return core.cache.reused.best(salt_prefix, most)


@command
def explain_request(core: CommandTarget, request_id: str) -> LookupRecord:
    """Return a request's prefix-cache look-up. Raises NotFound if the history lacks the request."""
    return core.cache.remembered(request_id).lookup


@command
def get_request_tokens(core: CommandTarget, request_id: str) -> RequestTokens:
    """Return a request's tokens so far. Raises NotFound if the history lacks the request."""
    remembered = core.cache.remembered(request_id)
    return RequestTokens(remembered.tokens, remembered.salt, remembered.media)


@command
def pin_prefix(
    core: CommandTarget,
    name: str,
    tokens: tuple[int, ...],
    salt: bytes = b"",
    owner: str = "",
    max_pages: int | None = None,
    media: tuple[MediaSpan, ...] = (),
) -> Pinned:
    """Pin the cached pages of these tokens. Raises NotConfigured, Overloaded or NotFound.

    ``max_pages`` limits all pins of this owner. If it is None, only the total limit applies.
    """
    limit = None if max_pages is None else PinLimit(owner, max_pages)
    return core.cache.pin(name, tokens, salt=salt, media=media, limit=limit)


@command
def unpin_prefix(core: CommandTarget, name: str, shown: str) -> int:
    """Release a pin; return the number of pages that are still pinned."""
    return core.cache.unpin(name, shown=shown)


@command
def flush_cache(core: CommandTarget) -> int:
    """Discard every cached page that is not in use; return the number of discarded pages."""
    return core.cache.blocks.flush()


@command
def subscribe_events(core: CommandTarget, tokens: bool = False) -> EventLogState:
    """Start announcing page events. With ``tokens``, record the tokens of new pages."""
    cache = core.cache
    number = cache.watch(tokens=tokens)
    since = cache.blocks.events.tokens_since or number
    return EventLogState(number, cache.log_id, cache.log_began, since)


@command
def unsubscribe_events(core: CommandTarget) -> None:
    core.cache.is_watched = False


@command
def page_events_since(core: CommandTarget, number: int, limit: int) -> list[PageEvent]:
    """Return at most ``limit`` events, starting at ``number``. Raises EventsGone if an event is gone."""
    try:
        return core.cache.blocks.events.since(number, limit)
    except EventsLost as error:
        raise EventsGone(str(error)) from error


@command
def get_cached_contents(core: CommandTarget) -> CachedContents:
    """Return the contents of cached pages with known tokens."""
    blocks = core.cache.blocks
    unknown = (blocks.events.tokens_since or 1) - 1
    return CachedContents(blocks.events.next_number - 1, unknown, blocks.cached_contents())


@command
def get_page_layout(core: CommandTarget) -> PageLayoutKey:
    """Return the layout of the engine's pages. Raises NotConfigured without a prefix cache."""
    return core.transfer.kind


@command
def find_prefix(core: CommandTarget, digests: tuple[Digest, ...]) -> CachedPrefix:
    """Return the longest cached prefix of a sequence with these pages."""
    return core.transfer.find_prefix(digests)


@command
def read_pages(
    core: CommandTarget, digests: tuple[Digest, ...], wanted: tuple[tuple[int, ...], ...] | None = None
) -> tuple[PagePart, ...]:
    """Return copies of cached pages: one ``PagePart`` per group of layers, then one for states.

    ``wanted`` has ascending indices into ``digests`` for each part; None: all pages.
    """
    return core.transfer.read(digests, wanted)


@command
def insert_pages(
    core: CommandTarget,
    tokens: tuple[int, ...],
    pages: PageBytes,
    salt: bytes,
    first: int,
    group: int,
    media: tuple[MediaSpan, ...] = (),
) -> int | None:
    """Cache pages ``first``, ``first + 1``, ... of a sequence in one group of layers.

    Return the number of pages that were not cached yet; None if the pages do not fit.
    """
    return core.transfer.insert(tokens, pages, salt, first=first, group=group, media=media)


@command
def list_pages(core: CommandTarget) -> dict[Digest, PageContents]:
    """Return the contents of every cached page. Empty unless ``save_dir`` is set."""
    return core.transfer.list_pages()


def _adapters(core: CommandTarget) -> AdapterPart:
    found = next((part for part in core.parts if isinstance(part, AdapterPart)), None)
    if found is None:
        raise NotConfigured(
            "the engine must have memory for adapters, got none; start it with --lora-dir or --lora-memory"
        )
    return found


@command
def count_unwritten_pages(core: CommandTarget, token_ids: Sequence[int], salt: bytes = b"") -> int:
    """Return how many pages of a prompt still wait to be written to the page store."""
    return 0 if core.shards is None else core.shards.num_unwritten(token_ids, salt)


@command
def load_adapter(core: CommandTarget, name: str, folder: str, replace: bool = False) -> AdapterInfo:
    """Load an adapter from a folder. Raises InvalidRequest if the adapter is not supported."""
    return _adapters(core).load(name, Path(folder), replace=replace)


@command
def unload_adapter(core: CommandTarget, name: str) -> None:
    """Unload an adapter. Raises NotFound for an unknown name, InvalidRequest while requests use it."""
    _adapters(core).unload(name)
