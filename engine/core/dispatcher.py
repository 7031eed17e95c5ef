"""Executes commands on the engine's thread: the one place where they meet what they are about."""

from __future__ import annotations

from typing import Any, cast

from octavo.block_manager import EventsLost, PageEvent
from octavo.block_manager.pins import PinLimit
from octavo.scheduler import Sequence
from octavo.scheduler.waiting import cached_tokens

from ..api.errors import EventsGone
from ..inspection.prefix_cache_inspector import PrefixCacheInspector
from ..kv_store.transfer import PageTransfer
from . import commands as ask
from .commands import AnswerT, Command


class CommandDispatcher:
    """Knows how to answer every command of ``commands.py``, from the cache and the pools of one core."""

    def __init__(self, cache: PrefixCacheInspector, transfer: PageTransfer) -> None:
        self._cache = cache
        self._transfer = transfer

    def execute(self, command: Command[AnswerT]) -> AnswerT:
        """The command's answer. Raises what the command says that it raises."""
        return cast(AnswerT, self._execute(command))

    def _execute(self, command: Command[Any]) -> Any:
        cache, transfer = self._cache, self._transfer
        match command:
            case ask.GetCacheStats(pin_prefix):
                return ask.CacheStats(cache.totals(), cache.pins(pin_prefix))
            case ask.ListReusedPrefixes(salt_prefix):
                return cache.prefixes(salt_prefix)
            case ask.ExplainRequest(request_id):
                return cache.remembered(request_id).lookup
            case ask.GetRequestTokens(request_id):
                remembered = cache.remembered(request_id)
                return ask.RequestTokens(remembered.tokens, remembered.salt)
            case ask.PinPrefix():
                limit = None
                if command.max_pages is not None:
                    limit = PinLimit(command.owner, command.max_pages)
                return cache.pin(command.name, command.tokens, salt=command.salt, limit=limit)
            case ask.UnpinPrefix(name, shown):
                return cache.unpin(name, shown=shown)
            case ask.FlushCache():
                return cache.flush()
            case ask.SubscribeEvents(tokens):
                return self._subscribe(tokens=tokens)
            case ask.UnsubscribeEvents():
                cache.is_watched = False
                return None
            case ask.PageEventsSince(number, limit):
                return self._events(number, limit)
            case ask.GetCachedContents():
                log = cache.blocks.events
                unknown = (log.tokens_since or 1) - 1
                return ask.CachedContents(log.next_number - 1, unknown, cache.blocks.cached_contents())
            case ask.GetPageLayout():
                return transfer.kind
            case ask.FindPrefix(digests):
                return transfer.find_prefix(digests)
            case ask.CountCached(tokens, salt, quantize_after):
                prompt = Sequence("", list(tokens), 1, salt, quantize_after=quantize_after)
                return cached_tokens(prompt, cache.blocks)
            case ask.ReadPages(digests, wanted):
                return transfer.read(digests, wanted)
            case ask.InsertPages(tokens, pages, salt, first, group):
                return transfer.insert(tokens, pages, salt, first=first, group=group)
            case ask.ListPages():
                return transfer.list_pages()
        raise TypeError(f"{type(command).__name__} is no command of commands.py; add a case for it")

    def _subscribe(self, *, tokens: bool) -> ask.EventLogState:
        cache = self._cache
        number = cache.watch(tokens=tokens)
        since = cache.blocks.events.tokens_since or number
        return ask.EventLogState(number, cache.log_id, cache.log_began, since)

    def _events(self, number: int, limit: int) -> list[PageEvent]:
        try:
            return self._cache.events(number, limit)
        except EventsLost as error:
            raise EventsGone(str(error)) from error
