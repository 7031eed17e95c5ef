from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.block_manager import BlockManager, MediaSpan, Pins
from octavo.block_manager.pins import MAX_NAMES, PinLimit
from octavo.scheduler import Lookup

from ..api.errors import NotConfigured, NotFound, Overloaded
from .lookup_history import MAX_REQUESTS, MAX_TOKENS, HistoryEntry, LookupHistory
from .reused_prefixes import ReusedPrefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTotals:
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
    num_tokens: int
    pinned_pages: int


class PrefixCacheInspector:
    """Inspection of the prefix cache for operators. Used only on the engine's thread."""

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
        self._announced = 1

    def record(self, request_id: str, lookup: Lookup) -> None:
        self.lookups.add(request_id, lookup, now=time.monotonic())
        self._num_query += lookup.num_tokens
        self._num_hit += lookup.num_hit
        self._misses.update(lookup.misses)
        if lookup.num_hit:
            self.reused.add(lookup.sequence, lookup.num_hit)

    @property
    def num_pinned(self) -> int:
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

    def remembered(self, request_id: str) -> HistoryEntry:
        """Return a request's look-up and tokens. Raises NotFound if the history lacks the request."""
        remembered = self.lookups.get(request_id)
        if remembered is None:
            raise NotFound(
                f"no request with this id is recorded: the history keeps at most {MAX_REQUESTS} requests "
                f"and {MAX_TOKENS} tokens; ask sooner after the request, with the id from its response"
            )
        return remembered

    def pin(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        salt: bytes,
        media: tuple[MediaSpan, ...] = (),
        limit: PinLimit | None = None,
    ) -> Pinned:
        """Pin the cached pages of these tokens.

        Raises NotConfigured if pins are off, Overloaded beyond a limit, and NotFound if nothing is cached.
        """
        most = self.blocks.max_pinned
        if not most:
            raise NotConfigured("pins are turned off; start the server with --max-pinned-pages N")
        if limit is not None and not self._pins.can_add_name(name, limit.owner):
            raise Overloaded(f"you can pin at most {MAX_NAMES} prefixes; unpin one of them first")
        kept = self._pins.pin(name, tokens, salt=salt, media=media, limit=limit)
        if kept == 0:
            raise NotFound(
                f"none of these {len(tokens)} tokens is cached, so there is nothing to pin; only full pages "
                f"of {self.blocks.page_size} tokens are cached, so send the prompt first, with the same salt"
            )
        if kept is None and limit is not None and limit.max_pages < most:
            raise Overloaded(
                f"{self._pins.num_pages_of(limit.owner)} pages are pinned by you and {self._pins.num_pages} "
                f"in all, so this pin would exceed your limit of {limit.max_pages} or the total of {most}; "
                "unpin something, or start the server with a larger --max-pinned-pages"
            )
        if kept is None:
            raise Overloaded(
                f"{self._pins.num_pages} pages are pinned, and this pin would exceed the limit of {most}; "
                "unpin something, or start the server with a larger --max-pinned-pages"
            )
        return Pinned(kept, self._pins.num_pages)

    def unpin(self, name: str, *, shown: str) -> int:
        if not self._pins.unpin(name):
            raise NotFound(f"no pin is called {shown!r}; `octavo cache stats` lists the pins")
        return self._pins.num_pages

    def pins(self, owner: str | None = None) -> dict[str, int]:
        return self._pins.kept(owner)

    def watch(self, *, tokens: bool = False) -> int:
        self.is_watched = True
        if tokens:
            self.blocks.keep_tokens()
        return self.blocks.events.next_number

    def has_updates(self) -> bool:
        if not self.is_watched or self._announced == self.blocks.events.next_number:
            return False
        self._announced = self.blocks.events.next_number
        return True
