"""The prefix cache as people ask about it: what requests found, what is pinned, what changes."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.block_manager import BlockManager, PageEvent, Pins
from octavo.block_manager.pins import MAX_NAMES, PinLimit
from octavo.scheduler import Lookup

from ..api.errors import NotConfigured, NotFound, Overloaded
from .lookup_history import HistoryEntry, LookupHistory
from .reuse_tree import ReusedPrefix, ReusedPrefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTotals:
    """Totals of the cache; counts are since the start, in tokens unless named otherwise."""

    enabled: bool
    page_size: int
    policy: str
    query_tokens: int
    hit_tokens: int
    miss_tokens: dict[str, int]
    evicted_pages: int
    pinned_pages: int
    max_pinned_pages: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """Positions that a pin keeps, and the pages of all pins."""

    num_tokens: int
    pinned_pages: int


class PrefixCacheInspector:
    """Everything about the cache that nobody needs in order to compute; lives on the engine's thread.

    is_watched     whether somebody is to be told of events
    lookups   the latest requests, by the engine's request id
    reused    the prefixes that were found, and how often
    log_id    names this engine's event log: its numbers mean nothing to another's
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.lookups = LookupHistory()
        self.reused = ReusedPrefixes(blocks.page_size)
        self.log_id = secrets.token_hex(8)
        self.log_began = time.time()
        self._pins = Pins(blocks)
        self._num_query = self._num_hit = 0
        self._misses: Counter[str] = Counter()
        self.is_watched = False
        self._announced = 1  # number of the next event when watchers were told last

    def record(self, request_id: str, lookup: Lookup) -> None:
        """A request's prompt was looked up."""
        self.lookups.add(request_id, lookup, now=time.monotonic())
        self._num_query += lookup.num_tokens
        self._num_hit += lookup.num_hit
        self._misses.update(lookup.misses)
        if lookup.num_hit:
            self.reused.add(lookup.sequence, lookup.num_hit)

    @property
    def num_pinned(self) -> int:
        """Pages that pins hold."""
        return self._pins.num_pages

    def totals(self) -> CacheTotals:
        blocks = self.blocks
        return CacheTotals(
            enabled=blocks.prefix_cache,
            page_size=blocks.page_size,
            policy=blocks.policy,
            query_tokens=self._num_query,
            hit_tokens=self._num_hit,
            miss_tokens=dict(self._misses),
            evicted_pages=blocks.num_evicted,
            pinned_pages=self._pins.num_pages,
            max_pinned_pages=blocks.max_pinned,
        )

    def prefixes(self, salt_prefix: bytes) -> list[ReusedPrefix]:
        """Return the prefixes of salts that begin like this."""
        return [prefix for prefix in self.reused if prefix.salt.startswith(salt_prefix)]

    def remembered(self, request_id: str) -> HistoryEntry:
        """Return the lookup of a request and its tokens; NotFound when it is not among the latest."""
        remembered = self.lookups.get(request_id)
        if remembered is None:
            raise NotFound(
                "no request of this id was admitted lately: the latest "
                f"{len(self.lookups)} are remembered; ask sooner, and spell it as its responses do"
            )
        return remembered

    def pin(self, name: str, tokens: Sequence[int], *, salt: bytes, limit: PinLimit | None = None) -> Pinned:
        """Keep what is cached of these tokens. NotConfigured without room for pins, Overloaded
        without enough of it, NotFound when nothing is cached; then nothing has changed."""
        most = self.blocks.max_pinned
        if not most:
            raise NotConfigured("no page may be pinned; start the server with --max-pinned-pages N")
        if limit is not None and not self._pins.has_name_left(name, limit.owner):
            raise Overloaded(f"at most {MAX_NAMES} prefixes may be pinned by you; unpin one of them first")
        kept = self._pins.pin(name, tokens, salt=salt, limit=limit)
        if kept == 0:
            raise NotFound(
                f"nothing of these {len(tokens)} tokens is cached, so there is nothing to pin; only full "
                f"pages of {self.blocks.page_size} are cached: send the prompt first, with this salt"
            )
        if kept is None and limit is not None and limit.max_pages < most:
            raise Overloaded(
                f"{self._pins.num_pages_of(limit.owner)} pages are pinned by you, {self._pins.num_pages} by "
                f"all, and the pin needs more than the {limit.max_pages} or {most} that may be; unpin "
                "something, or start the server with a larger --max-pinned-pages or --tenant-share"
            )
        if kept is None:
            raise Overloaded(
                f"{self._pins.num_pages} pages are pinned and at most {most} may be, the pin needs more; "
                "unpin something, or start the server with a larger --max-pinned-pages"
            )
        return Pinned(kept, self._pins.num_pages)

    def unpin(self, name: str, *, shown: str) -> int:
        """Let a pin go; pages of all pins afterwards. NotFound, naming it as ``shown``, if there is none."""
        if not self._pins.unpin(name):
            raise NotFound(f"nothing is pinned as {shown!r}; `octavo cache stats` lists the pins")
        return self._pins.num_pages

    def pins(self, owner: str | None = None) -> dict[str, int]:
        """Return the positions kept, by name, of one owner's pins (None: of all)."""
        return self._pins.kept(owner)

    def flush(self) -> int:
        """Forget every cached page that nobody holds; how many there were."""
        return self.blocks.flush()

    def watch(self, *, tokens: bool = False) -> int:
        """Somebody is to be told of events from now on; number of the next one.

        tokens   keep the tokens of pages that are published from now on
        """
        self.is_watched = True
        if tokens:
            self.blocks.keep_tokens()
        return self.blocks.events.next_number

    def has_news(self) -> bool:
        """Whether watchers are to be told: events came since this was asked last."""
        if not self.is_watched or self._announced == self.blocks.events.next_number:
            return False
        self._announced = self.blocks.events.next_number
        return True

    def events(self, number: int, limit: int) -> list[PageEvent]:
        """The events from a number on; EventsLost when they are not kept."""
        return self.blocks.events.since(number, limit)
